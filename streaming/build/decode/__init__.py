"""Decode the bytes of fields into objects: NumPy arrays, strings, numbers, Pillow images.

``resolve_decoders(spec).decoder_for(field)`` returns the :class:`~streaming.types.Decoder` of a field; ``decode_field``
calls it and adds context to its errors. No torch, no pickle, and nothing that runs code from the data.
"""

from streaming.build.decode.arrays import ArrayDecoder, NpzDecoder, array, npy, npz, safetensors
from streaming.build.decode.by_set import BySet, of_shard
from streaming.build.decode.crops import PixelBox, RandomPart
from streaming.build.decode.images import (
    ImageDecoder,
    RandomCropDecoder,
    center_crop,
    has_one_shape,
    image,
    random_crop,
    use_one_thread,
)
from streaming.build.decode.member_file import (
    DistantMember,
    MemberFile,
    Outcome,
    ReadDistant,
    ReadRange,
    decode_member,
    together,
)
from streaming.build.decode.registry import (
    DecodeSpec,
    FieldDecoder,
    FieldSpec,
    RawFields,
    bounded,
    decode_field,
    decodes_images,
    draws_numbers,
    gives_bytes,
    hands_out_views,
    is_ours,
    ranged_fields,
    resolve_decoders,
    runs_code_of_user,
    with_described,
    with_raw,
)
from streaming.build.decode.values import integer, json, msgpack, number, raw, text, unpacked, view
from streaming.build.decode.webdataset import from_webdataset
from streaming.types import Decoder

__all__ = [
    "ArrayDecoder",
    "BySet",
    "DecodeSpec",
    "Decoder",
    "DistantMember",
    "FieldDecoder",
    "FieldSpec",
    "ImageDecoder",
    "MemberFile",
    "NpzDecoder",
    "Outcome",
    "PixelBox",
    "RandomCropDecoder",
    "RandomPart",
    "RawFields",
    "ReadDistant",
    "ReadRange",
    "array",
    "bounded",
    "center_crop",
    "decode_field",
    "decode_member",
    "decodes_images",
    "draws_numbers",
    "from_webdataset",
    "gives_bytes",
    "hands_out_views",
    "has_one_shape",
    "image",
    "integer",
    "is_ours",
    "json",
    "msgpack",
    "npy",
    "npz",
    "number",
    "of_shard",
    "random_crop",
    "ranged_fields",
    "raw",
    "resolve_decoders",
    "runs_code_of_user",
    "safetensors",
    "text",
    "together",
    "unpacked",
    "use_one_thread",
    "view",
    "with_described",
    "with_raw",
]
