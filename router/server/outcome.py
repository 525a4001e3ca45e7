"""What a client is told of an error, whatever the transport."""

import logging

from common.errors import InternalError, TandemError

log = logging.getLogger(__name__)


def explained(error: Exception, what: str) -> TandemError:
    """Foreign exceptions are defects of ours: logged, and told without their words."""
    if isinstance(error, TandemError):
        # with its traceback it would hold the request until the next full collection
        return error.with_traceback(None)
    log.error("%s failed", what, exc_info=error)
    return InternalError("internal error; see the router's log")
