"""Read a folder of images: its sub-folders are classes, or a metadata file describes them."""

from __future__ import annotations

from typing import ClassVar

from shard_tools.make.convert.base.annotated import IMAGE_EXTENSIONS, NO_SIZE, look_at_image
from shard_tools.make.convert.media.metadata import MediaFolder
from shard_tools.make.write.filetypes import ONE_FIELD


class ImageFolder(MediaFolder):
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
