"""``/v1/decisions``: OpenAI's API for questions whose answers are labels."""

from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strandline.errors import RequestError
from strandline.server.http.sse import json_response
from strandline.server.labels.questions import MAX_QUESTIONS, YES_OR_NO, Kind, Option, Question, Reading
from strandline.server.labels.reads import LabelReads
from strandline.server.requests.request_bodies import Whole
from strandline.server.requests.service import Service
from strandline.server.requests.usage_and_logprobs import Json


class Strict(BaseModel):
    """A part of a body without other fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Text(Strict):
    """A part of a message."""

    type: Literal["input_text"]
    text: str


class Message(Strict):
    """A message of the input."""

    type: Literal["message"]
    role: Literal["user"]
    content: str | list[Text]


class Predicate(Strict):
    """A question that is answered by yes or no."""

    type: Literal["predicate"]
    instructions: str
    name: str | None = None

    def question(self, param: str) -> Question:
        """Return what the model is asked."""
        return Question(Kind.YES_NO, self.instructions, [Option(label) for label in YES_OR_NO], param)

    def answer(self, reading: Reading) -> Json:
        """Return the answer."""
        return {"type": self.type, "name": self.name, "probability": reading.probabilities[0]}


class ChoiceOption(Strict):
    """One of several answers."""

    value: str | bool
    description: str | None = None


class Choice(Strict):
    """A question with several answers."""

    type: Literal["choice"]
    instructions: str
    name: str | None = None
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=255)]

    def question(self, param: str) -> Question:
        """Return what the model is asked. Raises as ``Question``, or if two choices have one value."""
        if len({(type(each.value), each.value) for each in self.choices}) < len(self.choices):
            raise RequestError(f"{param}.choices must have values that differ", param=f"{param}.choices")
        options = [Option(_shown(each.value), each.description or "") for each in self.choices]
        return Question(Kind.CHOICE, self.instructions, options, f"{param}.choices")

    def answer(self, reading: Reading) -> Json:
        """Return the answer."""
        pairs = zip(self.choices, reading.probabilities, strict=True)
        return {
            "type": self.type,
            "name": self.name,
            "choice": self.choices[reading.best].value,
            "probabilities": [{"value": choice.value, "probability": probability} for choice, probability in pairs],
            "confidence": reading.confidence,
        }


class Level(Strict):
    """A level of a score."""

    label: str
    description: str | None = None


class Score(Strict):
    """A question for a level."""

    type: Literal["score"]
    instructions: str
    name: str | None = None
    levels: Annotated[list[Level], Field(min_length=2, max_length=10)]

    def question(self, param: str) -> Question:
        """Return what the model is asked."""
        options = [Option(level.label, level.description or "") for level in self.levels]
        return Question(Kind.SCORE, self.instructions, options, f"{param}.levels")

    def answer(self, reading: Reading) -> Json:
        """Return the answer."""
        pairs = enumerate(zip(self.levels, reading.probabilities, strict=True))
        probabilities = [
            {"value": value, "label": level.label, "probability": probability} for value, (level, probability) in pairs
        ]
        return {
            "type": self.type,
            "name": self.name,
            "score": reading.score,
            "probabilities": probabilities,
            "confidence": reading.confidence,
        }


class DecisionsBody(Strict):
    """Body of ``/v1/decisions``."""

    model: str | None = None
    input: str | Annotated[list[Message], Field(min_length=1)]
    questions: Annotated[
        list[Annotated[Predicate | Choice | Score, Field(discriminator="type")]],
        Field(min_length=1, max_length=MAX_QUESTIONS),
    ]
    safety_identifier: str | None = None
    joint: bool | None = None
    cache_salt: str | None = None
    priority: Whole | None = None
    include_cache_account: bool = False

    def text(self) -> str:
        """Return the text that the questions are about."""
        if isinstance(self.input, str):
            return self.input
        contents = [message.content for message in self.input]
        return "\n\n".join(
            content if isinstance(content, str) else "\n".join(part.text for part in content) for content in contents
        )


async def decide(service: Service, body: DecisionsBody, request: Request) -> Response:
    """Handle a request."""
    refuse_joint(body.joint)
    reads = LabelReads.of(service, request, body)
    questions = [each.question(f"questions.{index}") for index, each in enumerate(body.questions)]
    readings = await reads.ask([{"role": "user", "content": body.text()}], questions, None)
    answers = [each.answer(reading) for each, reading in zip(body.questions, readings, strict=True)]
    counts = reads.usage(with_account=body.include_cache_account)
    usage = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        **({"cache": counts["cache"]} if "cache" in counts else {}),
    }
    return json_response({"model": service.name_of(body.model), "answers": answers, "usage": usage})


def refuse_joint(joint: Any) -> None:
    """Raise a RequestError if questions are to be answered in one forward pass, which needs a model made for that."""
    if joint:
        raise RequestError("joint is not supported: every question is read by itself", param="joint")


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()
