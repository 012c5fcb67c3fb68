"""Read a folder of images whose sub-folders are classes."""

from __future__ import annotations

from typing import ClassVar

from shard_tools.make.convert.base.annotated import IMAGE_EXTENSIONS, NO_SIZE, look_at_image
from shard_tools.make.convert.base.class_folders import ClassFolders
from shard_tools.make.write.filetypes import ONE_FIELD


class ImageFolder(ClassFolders):
    """Images: ``width`` and ``height`` of the upright image become columns.

    Remarks count images without a size, and images turned by their EXIF orientation.
    """

    kind: ClassVar = "images"
    one: ClassVar = "an image"
    extensions: ClassVar = IMAGE_EXTENSIONS
    own_field: ClassVar = ONE_FIELD
    measures: ClassVar = ("width", "height")
    unread: ClassVar = NO_SIZE

    def look(self, data: bytes) -> tuple[dict[str, object], str]:
        """Return width and height of the upright image."""
        return look_at_image(data)
