"""``/v1/systemone``: questions about a state, each with criteria, answered by labels, with vLLM's body."""

import json
import time
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strandline.errors import RequestError
from strandline.server.http.request_ids import unique_id
from strandline.server.http.sse import json_response
from strandline.server.labels.decisions_api import refuse_joint
from strandline.server.labels.questions import MAX_QUESTIONS, YES_OR_NO, Kind, Option, Question, Reading
from strandline.server.labels.reads import LabelReads
from strandline.server.requests.request_bodies import Whole
from strandline.server.requests.service import Service
from strandline.server.requests.usage_and_logprobs import Json

NOT_READ = ("images", "audio", "videos")


class Asked(BaseModel):
    """A question: of several names, of yes or no, or of levels."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["choice", "noul", "score"]
    instructions: str
    criteria: dict[str, str | None] | list[str] | None = None

    def question(self, param: str) -> Question:
        """Return what the model is asked.

        Raises:
            RequestError: the criteria are not those of the type, or too few or too many.
        """
        criteria, where = self.criteria, f"{param}.criteria"
        if self.type == "score":
            if not isinstance(criteria, list):
                raise RequestError(f"{where} of a score must be a list of levels", param=where)
            return Question(Kind.SCORE, self.instructions, [Option(name) for name in criteria], where)
        if isinstance(criteria, list):
            raise RequestError(f"{where} of a {self.type} must be an object", param=where)
        if self.type == "choice":
            options = [Option(name, description or "") for name, description in (criteria or {}).items()]
            return Question(Kind.CHOICE, self.instructions, options, where)
        given = criteria or {}
        if given.keys() - {"true", "false"}:
            raise RequestError(f"{where} of a noul has true and false alone", param=where)
        descriptions = (given.get("true"), given.get("false"))
        options = [Option(label, text or "") for label, text in zip(YES_OR_NO, descriptions, strict=True)]
        return Question(Kind.YES_NO, self.instructions, options, where)

    def answer(self, question: Question, reading: Reading) -> Json:
        """Return the answer."""
        names, probabilities = [option.name for option in question.options], reading.probabilities
        if self.type == "score":
            legend = {str(index): name for index, name in enumerate(names)}
            by_name = dict(zip(legend, probabilities, strict=True))
            found: Json = {"score": reading.score, "legend": legend, "probabilities": by_name}
        else:
            by_name = dict(zip(names, probabilities, strict=True))
            value = {"choice": names[reading.best]} if self.type == "choice" else {"noul": probabilities[0]}
            found = {**value, "probabilities": by_name}
        return {"type": self.type, **found, "confidence": reading.confidence}


class SystemOneBody(BaseModel):
    """Body of ``/v1/systemone``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    state: Any
    questions: Annotated[dict[str, Asked], Field(min_length=1, max_length=MAX_QUESTIONS)]
    instructions: str | None = None
    images: list[str] | None = None
    audio: list[str] | None = None
    videos: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    joint: bool | None = None
    cache_salt: str | None = None
    priority: Whole | None = None
    request_id: str | None = None
    include_cache_account: bool = False

    def messages(self) -> list[Json]:
        """Return the conversation that the questions end.

        Raises:
            RequestError: it has what is not read.
        """
        for name in NOT_READ:
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: label reads take text", param=name)
        state = self.state if isinstance(self.state, str) else json.dumps(self.state, ensure_ascii=False)
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*system, {"role": "user", "content": state}]


async def decide_state(service: Service, body: SystemOneBody, request: Request) -> Response:
    """Handle a request."""
    refuse_joint(body.joint)
    reads = LabelReads.of(service, request, body)
    questions = {name: asked.question(f"questions.{name}") for name, asked in body.questions.items()}
    found = await reads.ask(body.messages(), list(questions.values()), body.chat_template_kwargs)
    readings = dict(zip(questions, found, strict=True))
    counts = reads.usage(with_account=body.include_cache_account)
    return json_response(
        {
            "id": body.request_id or f"decision-{unique_id()}",
            "object": "structured_decision",
            "created": int(time.time()),
            "model": service.name_of(body.model),
            "answers": {name: asked.answer(questions[name], readings[name]) for name, asked in body.questions.items()},
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "output_tokens": counts["completion_tokens"],
                **{name: counts[name] for name in ("prompt_tokens_details", "cache") if name in counts},
            },
            "diagnostics": {
                name: {"label_mass": reading.label_mass, "argmax_is_label": reading.is_label_likeliest}
                for name, reading in readings.items()
            },
            "joint": False,
        }
    )
