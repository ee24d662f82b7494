"""The engine: the core and the text part in one process. Synchronous; one step per call.

A bad request raises where it is added and touches nothing else.
"""

from collections.abc import Sequence

from strandline.cache import PrefixCache
from strandline.engine.core import EngineCore
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.records.outputs import RequestOutput
from strandline.records.sampling_params import SamplingParams
from strandline.text.frontend import CheckedRequest, Frontend
from strandline.text.output_streams import RequestStream
from strandline.text.remembered_answers import Recollection


class Engine:
    """Runs requests on one model."""

    def __init__(self, core: EngineCore, frontend: Frontend) -> None:
        self.core = core
        self.frontend = frontend
        self._outputs: dict[str, RequestOutput] = {}
        """Outputs of unfinished requests."""

    @property
    def cache(self) -> PrefixCache:
        return self.core.cache

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def vocab_size(self) -> int:
        return self.core.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.core.limits.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        salt: str = "",
        marks: tuple[int, ...] = (),
    ) -> None:
        """Check a request and queue it; the arguments are those of ``add_checked``.

        Raises:
            RequestError: the prompt, a parameter or the id cannot be served; nothing has changed.
        """
        request = self.frontend.check(prompt_ids, self.frontend.check_params(params))
        self.add_checked(request_id, request, prompt=prompt, salt=salt, marks=marks)

    def add_checked(
        self,
        request_id: str,
        request: CheckedRequest,
        *,
        prompt: str | None = None,
        salt: str = "",
        marks: tuple[int, ...] = (),
        recollection: Recollection | None = None,
    ) -> None:
        """Queue a request; the arguments are those of ``Frontend.open``.

        Raises:
            RequestError: the id, or that of one of its outputs, is in use or reserved; nothing has changed.
        """
        for submission in self.frontend.open(
            request_id, request, prompt=prompt, salt=salt, marks=marks, recollection=recollection
        ):
            self.core.add(submission)

    def abort(self, request_id: str) -> None:
        """End a request and free its memory. Unknown ids are ignored."""
        self._outputs.pop(request_id, None)
        for name in self.frontend.close(request_id):
            self.core.finish(name)

    @property
    def has_unfinished(self) -> bool:
        return len(self.frontend) > 0

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs so far of every request that got a token.

        A request's output is one object that later steps extend.
        """
        streams, stopped = self.frontend.take(self.core.step())
        for name in stopped:
            self.core.finish(name)
        return [self._extend(stream) for stream in streams]

    def _extend(self, stream: RequestStream) -> RequestOutput:
        """Extend a request's output by what it gained in a step."""
        output = self._outputs.get(stream.request_id)
        if output is None:
            output = self._outputs[stream.request_id] = stream.empty_output()
        output.extend(stream.take())
        if output.finished:
            del self._outputs[stream.request_id]
        return output

    def describe(self) -> list[str]:
        """Return the cache's capacity as a few lines of text."""
        return self.core.describe()
