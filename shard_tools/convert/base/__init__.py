"""Read what all sources read: files, records, rows, columns of Arrow, folders of classes. It knows no format's name."""
