"""Read folders of images and sounds: classes by folder, notes of metadata files, and what lies beside a file."""
