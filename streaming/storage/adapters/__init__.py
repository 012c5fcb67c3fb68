"""Talk to one kind of store each: local disks, object stores, fsspec."""
