"""Routes about the server itself: health, readiness, and the served models."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from marin_rl.inference.client.protocol import MODELS_ROUTE
from marin_rl.serving.api.service import Service, json_response


def catalog_routes(service: Service) -> list[Route]:
    """Health and models."""

    def described(model: str) -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": service.created,
            "owned_by": "marin-rl",
            "root": service.name,
            "parent": None if model == service.name else service.name,
            "max_model_len": service.engine.context_length,
        }

    async def healthz(request: Request) -> Response:
        """The process answers."""
        return json_response({"status": "ok"})

    async def readyz(request: Request) -> Response:
        """New work is taken."""
        ready = service.engine.alive and not (service.draining or service.stopping)
        return json_response({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def models(request: Request) -> Response:
        """The loaded weights under their own id, and the name that always means them."""
        return json_response({"object": "list", "data": [described(m) for m in service.known]})

    async def model(request: Request) -> Response:
        """Return one served model."""
        asked = request.path_params["model"]
        service.check_model(asked)
        return json_response(described(asked))

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route(MODELS_ROUTE, models),
        Route(MODELS_ROUTE + "/{model:path}", model),
    ]
