"""What the server's refusals mean for a site: whether it tries again, joins again, drops a message, or ends."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """The server refuses this site. Retrying would not help."""


class TooLarge(Exception):
    """The reply is larger than the server accepts."""


class Away(Exception):
    """The server cannot be reached at the moment; retry."""


class Busy(Away):
    """The server receives other replies at the moment; retry."""


class Withdrawn(Exception):
    """The server no longer waits for an answer to this message."""


class Unknown(Exception):
    """The server does not know this node any more; join again."""


def broken(text: str, joined: bool, unreachable: str) -> Exception:
    """The exception for a connection that failed, from the text of its error; `unreachable` says it for the operator.

    `joined`: this site took part before. It then waits for a certificate that was not renewed in time, and sends
    nothing meanwhile.
    """
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or text
        return (Away if joined else Refused)(f"the server's certificate is not accepted: {reason}")
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return Refused("the server does not use TLS; it was started with --insecure")
    return Away(unreachable)


def verdict(response: Any, joined: bool, before: bool = False) -> Exception:
    """The exception for an HTTP error; see gate.py and access.py for reasons. `joined`: the server knew this node.

    `before`: this site took part before.
    """
    try:
        why = str(response.json().get("refused", ""))[:300]
    except (ValueError, AttributeError, RecursionError):
        why = ""
    if joined and (response.status_code in (401, 412) or why.startswith(("key", "source"))):
        return Unknown("the server was restarted")  # and registered its sites again
    if why.startswith("size"):
        return TooLarge(why)
    if why.startswith(("late", "withdrawn")):
        return Withdrawn(why)
    if why.startswith("busy"):
        return Busy(why)
    if why.startswith("the request did not arrive"):
        return Away(why)
    if (joined or before) and why.startswith("clock"):  # it was set during the run, and may be set right again
        return Away(f"the server refuses this site: {why}")
    if why:
        return Refused(f"the server refuses this site: {why}")
    if response.status_code == 412:
        return Away("the server still regards this site as online, for up to a minute")
    if response.status_code == 401:
        return Refused("the server refuses this site: its signature is not valid")
    return Away(f"the server answered {response.status_code} ({response.text[:200]})")
