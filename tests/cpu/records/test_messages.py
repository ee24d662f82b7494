"""Messages to the engine process."""

from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.messages import ENCODER, TO_CORE, Submit
from strandline.records.pictures import Picture, PictureSpan
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams


def test_message_has_each_picture_once_for_all_sequences() -> None:
    pixels = {name: Picture(name, name * 10_000, 1, 1, (1, 1)) for name in (b"cat", b"dog")}
    spans = tuple(PictureSpan(start, 1, 1, name) for start, name in ((0, b"cat"), (2, b"dog"), (4, b"cat")))
    new = NewRequest(RequestId("x"), (7, 1, 7, 1, 7, 1), SamplingParams(), 0, frozenset(), ())
    submissions = [Submission(new, 9, pictures=spans, pixels=pixels)] * 3 + [Submission(new, 9)]
    data = ENCODER.encode(Submit.of(submissions))
    assert len(data) < 3 * 30_000
    message = TO_CORE.decode(data)
    assert isinstance(message, Submit)
    assert message.complete() == submissions
