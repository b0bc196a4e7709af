"""The API's own description, made of the very classes that read requests and write answers."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from dspark.serving.answer_schema import Answer, ModelCard, ModelList
from dspark.serving.openai_schema import ChatRequest, CompletionRequest
from dspark.serving.request_fields import UNSUPPORTED, WITHOUT_EFFECT
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

REQUESTS: Mapping[str, type[pydantic.BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
ANSWERS: Mapping[str, type[pydantic.BaseModel]] = {
    "/v1/chat/completions": Answer,
    "/v1/completions": Answer,
    "/tokenize": TokenizeAnswer,
    "/detokenize": DetokenizeAnswer,
    "/v1/models": ModelList,
    "/v1/models/{model}": ModelCard,
}
STREAMED = ("/v1/chat/completions", "/v1/completions")
REFUSALS = {
    400: "what is wrong with the request, its parameter by name",
    401: "no valid key",
    404: "another model",
    413: "a body that is too long",
    422: "two replicas failed while they worked on the request, which is not tried again",
    429: "too many requests; Retry-After says when to come back",
    500: "a failure of the server's own",
    503: "nothing can be served now; Retry-After says when to come back",
    504: "the request took too long",
}
_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


@functools.cache
def openapi_document(model_name: str) -> dict[str, Any]:
    """OpenAPI 3.1, of a server of this model."""
    classes = list(dict.fromkeys([*REQUESTS.values(), *ANSWERS.values()]))
    _, definitions = models_json_schema(
        [(one, "validation") for one in classes], ref_template="#/components/schemas/{model}"
    )
    schemas = {name: _nullable(schema) for name, schema in definitions["$defs"].items()}
    for request_class in REQUESTS.values():
        _add_other_fields(schemas[request_class.__name__])
        _name_model(schemas[request_class.__name__], model_name)
    paths: dict[str, Any] = {path: {"post": _post(path, one.__name__)} for path, one in REQUESTS.items()}
    paths["/v1/models"] = {"get": _get(_json(ModelList.__name__))}
    paths["/v1/models/{model}"] = {"get": _get(_json(ModelCard.__name__), parameter="model")}
    anything = {"application/json": {"schema": {"type": "object"}}}
    paths["/version"] = {"get": {"responses": {"200": _response("the version of this server", anything)}}}
    health = {"200": _response("a replica answers", anything), "503": _response("none does", anything)}
    paths["/health"] = {"get": {"responses": health}}
    text = {"text/plain": {"schema": {"type": "string"}}}
    paths["/metrics"] = {"get": {"responses": {"200": _response("Prometheus text", text)} | _refusals(503)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dspark", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR, **schemas},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(path: str, request_name: str) -> dict[str, Any]:
    content = _json(ANSWERS[path].__name__)
    if path in STREAMED:
        content = content | {"text/event-stream": {"schema": {"type": "string"}}}
    parameters = [{"name": "X-Request-Id", "in": "header", "schema": {"type": "string", "pattern": "^[!-~]{1,256}$"}}]
    if path in STREAMED:
        parameters.append({"name": "X-Priority", "in": "header", "schema": {"type": "integer", "format": "int32"}})
    return {
        "parameters": parameters,
        "requestBody": {"required": True, "content": _json(request_name)},
        "responses": {"200": _response("the answer", content)} | _refusals(*REFUSALS),
        "security": [{}, {"key": []}],
    }


def _get(content: dict[str, Any], *, parameter: str | None = None) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    parameters = [] if parameter is None else [{"name": parameter, "in": "path", "required": True, "schema": schema}]
    return {
        "parameters": parameters,
        "responses": {"200": _response("what is served", content)} | _refusals(401, 404),
        "security": [{}, {"key": []}],
    }


def _refusals(*statuses: int) -> dict[str, Any]:
    return {str(status): _response(REFUSALS[status], _json("Error")) for status in statuses}


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": content}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The same with null for every field that may be left out, which means the same."""
    required: Sequence[str] = schema.get("required", [])
    properties = {
        name: field if name in required else _or_null(field) for name, field in schema.get("properties", {}).items()
    }
    return schema | ({"properties": properties} if properties else {})


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in field.items() if key in ("default", "description", "title")}
    kind = {key: value for key, value in field.items() if key not in told}
    return {"anyOf": [kind, {"type": "null"}], **told}


def _add_other_fields(schema: dict[str, Any]) -> None:
    """What is accepted without being read: fields without effect, and unsupported ones that ask for nothing."""
    for name, reason in WITHOUT_EFFECT.items():
        schema["properties"].setdefault(name, {"description": f"Ignored: {reason}."})
    for name, refused in UNSUPPORTED.items():
        values = [*refused.neutral, None]
        schema["properties"].setdefault(name, {"enum": values, "description": f"Not supported: {refused.reason}."})


def _name_model(schema: dict[str, Any], model_name: str) -> None:
    """The only model there is."""
    values = [model_name] if "model" in schema.get("required", []) else [model_name, None]
    described = schema["properties"]["model"].get("description", "")
    schema["properties"]["model"] = {"enum": values, "description": described}
