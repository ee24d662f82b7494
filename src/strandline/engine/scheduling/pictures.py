"""Pictures in steps: how far a prompt can be computed with those that are encoded, and what a plan says of them.

The memory of encoded pictures is bounded by the largest picture and the largest step. It holds what running prompts
need, and what is left of others, the last used longest. A picture is encoded once for all prompts that need it
together, and not at all where the prefix cache covers it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from strandline.engine.requests.request import Request
from strandline.errors import EngineError
from strandline.ids import FIRST_VIRTUAL_ID, NO_TOKEN, RequestId
from strandline.records.pictures import Picture, PictureSpan, rotary_delta
from strandline.records.plan import PictureToEncode, SequencePlan


class PictureRows:
    """Allocates rows of the memory of encoded pictures, by picture.

    Args:
        num_rows: number of rows of the memory, one for each token.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows = OrderedDict[bytes, range]()
        """By digest; the last used last."""
        self._pinned = set[bytes]()
        self._to_encode = dict[bytes, PictureToEncode]()

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these pictures, which running prompts have begun, and no others from now on."""
        self._pinned = set(digests)

    def __contains__(self, digest: bytes) -> bool:
        """Whether a picture has rows."""
        return digest in self._rows

    def take(self, digest: bytes, num_tokens: int, picture: Picture | None) -> bool:
        """Find or allocate rows for a picture, and keep it until the next ``pin``; whether there is room.

        Args:
            picture: its pixels; None only if it has rows.

        Raises:
            EngineError: there never is room.
        """
        if num_tokens > self._num_rows:
            raise EngineError(f"a picture of {num_tokens} tokens exceeds the {self._num_rows} that can be encoded")
        if digest not in self._rows:
            if picture is None:
                raise EngineError(f"picture {digest.hex()} cannot be encoded without its pixels")
            first = self._make_room(num_tokens)
            if first is None:
                return False
            self._rows[digest] = range(first, first + num_tokens)
            self._to_encode[digest] = PictureToEncode(picture, first)
        self._rows.move_to_end(digest)
        self._pinned.add(digest)
        return True

    def rows(self, digest: bytes) -> range:
        """Return the rows of a picture that was taken."""
        return self._rows[digest]

    def take_new(self) -> tuple[PictureToEncode, ...]:
        """Return the pictures to be encoded before the step that is planned."""
        new, self._to_encode = self._to_encode, {}
        return tuple(new.values())

    def _make_room(self, num_tokens: int) -> int | None:
        """Return the first of as many free rows; evict pictures that are not pinned. None: those pinned leave none."""
        pinned = [rows for digest, rows in self._rows.items() if digest in self._pinned]
        if _first_gap(pinned, num_tokens, self._num_rows) is None:
            return None
        while (first := _first_gap(self._rows.values(), num_tokens, self._num_rows)) is None:
            oldest = next(digest for digest in self._rows if digest not in self._pinned)
            del self._rows[oldest]
            self._to_encode.pop(oldest, None)
        return first


def _first_gap(taken: Iterable[range], num_tokens: int, num_rows: int) -> int | None:
    """Return the first row of a free range; None: there is none that is long enough."""
    bounds = sorted(taken, key=lambda rows: rows.start)
    edges = [range(0), *bounds, range(num_rows, num_rows)]
    return next((left.stop for left, right in pairwise(edges) if right.start - left.stop >= num_tokens), None)


class PictureSteps:
    """The part of the scheduler that handles pictures. Costs nothing while no request has any.

    Args:
        num_rows: number of rows of the memory of encoded pictures; 0: the model reads none.
        looks_ahead: whether a step also needs the embedding of the token after its last one, for drafts.
    """

    def __init__(self, num_rows: int, *, looks_ahead: bool) -> None:
        self._encoded = PictureRows(num_rows)
        self._num_ahead = int(looks_ahead)
        self._requests = dict[RequestId, Request]()
        """Unfinished requests with pictures."""
        self._deltas = dict[RequestId, int]()
        """What all pictures of a request add to positions for rotary embeddings."""
        self._asked = dict[RequestId, set[bytes]]()
        """Digests of pictures that requests wait for, whose pixels are not here."""
        self._missing = dict[bytes, None]()
        """Those that ``ask`` has not been called with yet."""
        self.ask: Callable[[list[bytes]], None] = _refuse
        """Called with digests of pictures to be given to ``receive``."""

    def add(self, request: Request) -> None:
        """Note a new request."""
        if request.submission.pictures:
            self._requests[request.request_id] = request
            self._deltas[request.request_id] = rotary_delta(request.submission.pictures)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request.request_id, None)
        self._deltas.pop(request.request_id, None)
        self._asked.pop(request.request_id, None)

    @property
    def is_waiting(self) -> bool:
        """Whether requests wait for pixels."""
        return any(self._asked.values())

    def receive(self, pictures: Sequence[Picture]) -> None:
        """Give pictures to the requests that wait for them."""
        for request_id, asked in self._asked.items():
            for picture in pictures:
                if picture.digest in asked:
                    asked.remove(picture.digest)
                    self._requests[request_id].pixels[picture.digest] = picture

    def begin_step(self) -> None:
        """Keep the pictures that prompts have computed in part."""
        if self._requests:
            self._encoded.pin(
                span.digest
                for request in self._requests.values()
                if request.lease is not None and request.lease.computed < request.submission.pictures[-1].end
                for span in request.submission.pictures
                if span.start < request.lease.computed < span.end
            )

    def limit(self, request: Request, start: int, end: int) -> int:
        """Return up to which token a step can compute a request; take the pictures that it needs."""
        for span in request.submission.pictures:
            if span.start >= end + self._num_ahead:
                break
            if span.end > start and not self._take(request, span):
                return max(start, span.start - self._num_ahead)
        return end

    def _take(self, request: Request, span: PictureSpan) -> bool:
        """Whether a picture is encoded or can be in this step; ask for its pixels if they are not here."""
        picture = request.pixels.get(span.digest)
        if picture is None and span.digest not in self._encoded:
            self._note_missing(request, span.start)
            return False
        return self._encoded.take(span.digest, span.num_tokens, picture)

    def _note_missing(self, request: Request, start: int) -> None:
        """Note all pictures from a position on that are not here, so that the prompt waits for them together."""
        asked = self._asked.setdefault(request.request_id, set())
        for span in request.submission.pictures:
            is_here = span.digest in request.pixels or span.digest in self._encoded
            if span.start >= start and not is_here and span.digest not in asked:
                asked.add(span.digest)
                self._missing[span.digest] = None

    def complete(self, sequences: list[SequencePlan]) -> list[SequencePlan]:
        """Return sequences with what is said of their pictures; ask for those that the step's requests lack."""
        if self._missing:
            missing, self._missing = [*self._missing], {}
            self.ask(missing)
        if not self._requests:
            return sequences
        return [self._completed(each) if each.request_id in self._requests else each for each in sequences]

    def _completed(self, plan: SequencePlan) -> SequencePlan:
        start, end = plan.start, plan.end
        spans = self._requests[plan.request_id].submission.pictures
        if start > spans[-1].end:
            return plan._replace(rotary_delta=self._deltas[plan.request_id])
        before = [span for span in spans if span.end < start]
        near = tuple(span for span in spans[len(before) :] if span.start <= end)
        token_ids, next_id = list(plan.token_ids), plan.next_id
        for span in near:
            first, last = max(span.start, start), min(span.end, end)
            if first < last or (next_id != NO_TOKEN and span.start <= end < span.end):
                row = FIRST_VIRTUAL_ID + self._encoded.rows(span.digest).start - span.start
                token_ids[first - start : last - start] = range(row + first, row + last)
                next_id = row + end if next_id != NO_TOKEN and end < span.end else next_id
        return plan._replace(
            token_ids=tuple(token_ids), next_id=next_id, rotary_delta=rotary_delta(before), pictures=near
        )

    def take_new(self) -> tuple[PictureToEncode, ...]:
        """Return the pictures to be encoded before the step."""
        return self._encoded.take_new()


def _refuse(digests: list[bytes]) -> None:
    raise EngineError(f"a request lacks the pixels of {len(digests)} pictures, and cannot ask for them")
