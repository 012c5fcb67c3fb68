"""Read folders of images and sounds: classes by folder, notes of metadata files, what lies beside a file; no tables."""
