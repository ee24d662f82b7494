"""Pictures in steps: how far a prompt can be computed with those that are encoded, and what a plan says of them."""

from collections.abc import Sequence

from strandline.engine.encoded_pictures import EncodedPictures
from strandline.engine.request import Request
from strandline.ids import FIRST_VIRTUAL_ID, NO_TOKEN, RequestId
from strandline.records.pictures import rotary_delta
from strandline.records.plan import PictureToEncode, SequencePlan


class PictureSteps:
    """The part of the scheduler that handles pictures. Costs nothing while no request has any.

    Args:
        num_rows: of the memory of encoded pictures; 0: the model reads none.
        looks_ahead: whether a step also needs the embedding of the token after its last one, for drafts.
    """

    def __init__(self, num_rows: int, *, looks_ahead: bool) -> None:
        self._encoded = EncodedPictures(num_rows)
        self._num_ahead = int(looks_ahead)
        self._requests = dict[RequestId, Request]()
        """Unfinished requests with pictures."""
        self._deltas = dict[RequestId, int]()
        """What all pictures of a request add to positions for rotary embeddings."""

    def add(self, request: Request) -> None:
        """Note a new request."""
        if request.pictures:
            self._requests[request.request_id] = request
            self._deltas[request.request_id] = rotary_delta(request.pictures)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request.request_id, None)
        self._deltas.pop(request.request_id, None)

    def begin_step(self) -> None:
        """Keep the pictures that prompts have computed in part."""
        if self._requests:
            self._encoded.pin(
                span.digest
                for request in self._requests.values()
                if request.lease is not None and request.lease.computed < request.pictures[-1].end
                for span in request.pictures
                if span.start < request.lease.computed < span.end
            )

    def limit(self, request: Request, start: int, end: int) -> int:
        """Return up to which token a step can compute a request; take the pictures that it needs."""
        for span in request.pictures:
            if span.start >= end + self._num_ahead:
                break
            if span.end > start and not self._encoded.take(request.pixels[span.digest], span.num_tokens):
                return max(start, span.start - self._num_ahead)
        return end

    def complete(self, sequences: Sequence[SequencePlan]) -> list[SequencePlan]:
        """Return sequences with what is said of their pictures."""
        return [self._completed(each) if each.request_id in self._requests else each for each in sequences]

    def _completed(self, plan: SequencePlan) -> SequencePlan:
        start, end = plan.start, plan.end
        spans = self._requests[plan.request_id].pictures
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
