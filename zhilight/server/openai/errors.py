"""One mapping from exceptions to OpenAI error bodies and HTTP statuses.

A client's fault is a 4xx and never a 5xx: the SDKs repeat a request that got a 5xx.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import msgspec
from aiohttp import web

from zhilight.errors import ConfigError, EngineBusy, EngineDead, RequestError

logger = logging.getLogger(__name__)

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          405: "invalid_request_error", 408: "timeout_error", 409: "invalid_request_error",
          413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
          500: "server_error", 503: "service_unavailable_error"}


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorBody


class APIError(Exception):
    """An answer with an error status, raised anywhere below a route."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(ErrorBody(
            message=self.message, type=_TYPES.get(self.status, "invalid_request_error"), param=self.param,
            code=self.code or self.status)))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def to_api_error(error: BaseException) -> APIError:
    """The answer that `error` deserves; an exception nobody expected is logged with its traceback and becomes a 500."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return APIError(400, str(error), param=error.param)
    if isinstance(error, EngineBusy):
        return APIError(503, str(error), code="engine_busy", headers={"Retry-After": _seconds(error.retry_after)})
    if isinstance(error, EngineDead):
        return APIError(503, str(error) or "The engine ended; the server is shutting down.", code="engine_dead")
    if isinstance(error, msgspec.ValidationError):
        return APIError(400, f"The request body is not valid: {error}.", param=_param_of(str(error)))
    if isinstance(error, msgspec.DecodeError):
        return APIError(400, f"The request body is not JSON: {error}.", code="invalid_json")
    if isinstance(error, RecursionError):
        return APIError(400, "The request body is nested too deeply.", code="invalid_json")
    if isinstance(error, ConfigError):
        return APIError(400, str(error))
    if isinstance(error, web.HTTPException):
        return _from_aiohttp(error)
    logger.error("unexpected error while answering a request", exc_info=error)
    return APIError(500, f"Internal error ({type(error).__name__}); the server's log has the details.")


def error_response(error: BaseException) -> web.Response:
    api_error = to_api_error(error)
    response = web.Response(status=api_error.status, body=api_error.body(), headers=api_error.headers,
                            content_type="application/json")
    if api_error.headers.get("Connection") == "close":
        response.force_close()
    return response


def _from_aiohttp(error: web.HTTPException) -> APIError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return APIError(413, "The request body is larger than this server accepts (--max-body-mb).")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return APIError(405, f"{error.method} is not allowed here; use {', '.join(sorted(error.allowed_methods))}.",
                        headers={"Allow": ", ".join(sorted(error.allowed_methods))})
    if error.status == 404:
        return APIError(404, "There is no such route. The routes are listed in /openapi.json.", code="route_not_found")
    return APIError(error.status, error.reason or "HTTP error")


def _param_of(message: str) -> str | None:
    """`Expected `int`, got `str` - at `$.messages[0].role`` -> messages[0].role."""
    match = re.search(r"at `\$\.?([^`]*)`", message) or re.search(r"missing required field `([^`]+)`", message)
    return (match.group(1) or None) if match else None


def _seconds(delay: float) -> str:
    return str(max(1, round(delay)))
