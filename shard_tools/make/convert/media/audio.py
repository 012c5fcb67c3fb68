"""Read a folder of sounds, as one of images. The only module of the tools that knows soundfile."""

from __future__ import annotations

import io
from typing import Any, ClassVar

from shard_tools.make.convert.base.records import SourceOptions
from shard_tools.make.convert.media.metadata import MediaFolder
from streaming.build.decode.sound import measured
from streaming.errors import ConfigError
from streaming.storage import Storage

AUDIO_EXTENSIONS = frozenset({"wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "aac", "aif", "aiff", "au", "w64"})
_MOST_FRAMES = 1 << 48  # 46 years at 192 kHz: some programs write such a length if it is unknown
_UNREAD = (
    "no duration, rate and channels: the sound is damaged, or of a kind that soundfile does not read (such as m4a)"
)


class AudioFolder(MediaFolder):
    """Sounds: ``duration`` in seconds, ``rate`` in Hz and ``channels`` become columns. No sound is decoded.

    Raises:
        ConfigError: The extra ``audio`` is not installed.
    """

    kind: ClassVar = "audio"
    one: ClassVar = "a sound"
    extensions: ClassVar = AUDIO_EXTENSIONS
    own_field: ClassVar = "all become the field .%s; decoders have to look at the content"
    measures: ClassVar = ("duration", "rate", "channels")
    unread: ClassVar = _UNREAD

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        _soundfile()  # fail before anything is listed
        super().__init__(spec, storage, options)

    def look(self, data: bytes) -> tuple[dict[str, object], str]:
        """Return duration, rate and channels: by ``Sound``, or by the header for formats that it does not read."""
        try:
            frames, rate, channels = measured(data)
        except ValueError:
            with _soundfile().SoundFile(io.BytesIO(data)) as sound:
                frames, rate, channels = sound.frames, sound.samplerate, sound.channels
        if not 0 <= frames < _MOST_FRAMES or rate <= 0:
            raise ValueError(f"{frames} frames at {rate} Hz")
        return {"duration": frames / rate, "rate": rate, "channels": channels}, ""


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library is missing
        raise ConfigError(f"--from audio: needs soundfile: pip install 'shardstream[audio]' ({error})") from error
    return soundfile
