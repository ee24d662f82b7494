"""When sequences were admitted, to be sent with their first tokens."""

from collections.abc import Iterable

from strandline.clock import SYSTEM_CLOCK
from strandline.engine.requests.request import Request
from strandline.ids import RequestId
from strandline.records.events import Admission
from strandline.records.plan import StepPlan


class Admissions:
    """The admissions of sequences that have no token yet."""

    def __init__(self) -> None:
        self._admitted_s: dict[RequestId, float] = {}

    def note(self, plan: StepPlan) -> None:
        """Record the admissions of the sequences whose first step this is."""
        if plan.new:
            now_s = SYSTEM_CLOCK()
            self._admitted_s.update((new.request_id, now_s) for new in plan.new)

    def take(self, advanced: Iterable[Request]) -> list[Admission]:
        """Return the admissions of sequences that got their first token, and forget them."""
        if not (times := self._admitted_s):
            return []
        return [
            Admission(each.request_id, times.pop(each.request_id), each.loads.begun_s, each.loads.ended_s)
            for each in advanced
            if each.request_id in times
        ]

    def forget(self, request_id: RequestId) -> None:
        """Drop a sequence that has ended."""
        self._admitted_s.pop(request_id, None)
