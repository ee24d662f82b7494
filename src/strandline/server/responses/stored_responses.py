"""The endpoints of stored responses: ``/v1/responses/{id}`` and what is below it."""

from typing import Annotated, Final, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import Response

from strandline.errors import RequestError
from strandline.server.http.gate import owner_of
from strandline.server.http.sse import json_response
from strandline.server.requests.service import Service

MAX_PAGE: Final = 100


def add_stored_responses(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    store = service.responses

    @app.get("/v1/responses/{response_id}")
    async def response(response_id: str, request: Request, stream: bool = False) -> Response:
        if stream:
            raise RequestError("a stored response is not streamed; leave stream out", param="stream")
        return json_response(store.response(owner_of(request), response_id))

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> Response:
        store.remove(owner_of(request), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{operation}", include_in_schema=False)
    async def other_operation(operation: str) -> Response:
        raise HTTPException(404)  # not a 405 that advises to get a response of this id

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> Response:
        store.response(owner_of(request), response_id)
        raise RequestError(
            "the response is complete; only responses with background: true, which this server does not "
            "serve, can be cancelled"
        )

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        items = store.input_items(owner_of(request), response_id)
        if order == "desc":
            items.reverse()
        ids = [item.get("id") for item in items]
        if after is not None and after not in ids:
            raise RequestError(f"after must be the id of an input item, got {after[:100]!r}", param="after")
        start = 0 if after is None else ids.index(after) + 1
        page = items[start : start + limit]
        ends = (page[0].get("id"), page[-1].get("id")) if page else (None, None)
        body = {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1]}
        return json_response({**body, "has_more": start + limit < len(items)})
