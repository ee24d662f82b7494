"""A prompt, as the HTTP process sends it to an engine."""

from dataclasses import dataclass, field

from strandline.records.pictures import PlacedPicture
from strandline.text.remembered_answers import Recollection


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the engine."""

    token_ids: list[int]
    text: str | None = None
    marks: tuple[int, ...] = ()
    """Token positions where a snapshot is requested."""
    recollection: Recollection | None = field(default=None, compare=False)
    """What it has to do with remembered answers; None: answers to it are not remembered."""
    continued: str = ""
    """The beginning of the answer, if the prompt ends with it and the output continues it."""
    pictures: tuple[PlacedPicture, ...] = ()

    @property
    def num_pixel_bytes(self) -> int:
        """Memory of its pictures."""
        return sum(len(pixels) for pixels in {picture.digest: picture.pixels for _, picture in self.pictures}.values())
