"""Requests to a registry: TLS, proxies, authorization, timeouts and retries.

Tokens: https://distribution.github.io/distribution/spec/auth. Import it late: urllib3 takes longer than a hook may.
"""

import json
import os
import random
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from email.utils import parsedate_to_datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote, urlencode, urljoin, urlsplit

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, SSLError

from ocihook import __version__
from ocihook.errors import ConfigError, RegistryError, reason
from ocihook.registry.credentials import Credentials, find_credentials

DOCKER_HUB = "docker.io"
_DOCKER_HUB_HOST = "registry-1.docker.io"
_MAX_ANSWER_BYTES = 1 << 20
_CONNECT_TIMEOUT_S = 15.0
_MAX_PAUSE_S = 30.0
_MAX_RETRY_AFTER_S = 60.0
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_FINAL_ERRORS = (SSLError, LocationParseError)
_PARAMETER = re.compile(r'([A-Za-z_]+)="([^"]*)"')
_TOKEN = re.compile(r"[\x21-\x7e]+")

Body = Callable[[], Iterable[bytes]]


class Access(NamedTuple):
    """How registries are reached."""

    auth_file: Path | None = None  # None: where podman and docker have it
    ca_file: Path | None = None  # certificates that are trusted besides the system's
    plain_http: bool = False
    timeout_s: float = 60.0  # without a byte sent or received
    attempts: int = 5  # without any progress
    backoff_s: float = 0.5  # before the second attempt; twice as long before each one after it


class Answer(NamedTuple):
    """An answer that has been read."""

    status: int
    headers: Mapping[str, str]  # names are case-insensitive
    data: bytes
    url: str  # of the request

    @property
    def location(self) -> str:
        """The URL in its Location header."""
        return urljoin(self.url, self.headers.get("Location", ""))

    def errors(self) -> list[tuple[str, str]]:
        """Return code and message of each error that it reports."""
        try:
            found = json.loads(self.data).get("errors")
        except (ValueError, RecursionError, AttributeError):
            return []
        errors = [error for error in found if isinstance(error, Mapping)] if isinstance(found, list) else []
        return [(str(error.get("code", "")), str(error.get("message", ""))) for error in errors]


class _Link:
    """What one process keeps for a registry: connections and an authorization."""

    def __init__(self, pool: urllib3.PoolManager) -> None:
        self.pid = os.getpid()
        self.pool = pool
        self.lock = threading.Lock()
        self.authorization = ""
        self.actions: set[str] = set()


class Transport:
    """The way to one repository. Threads may share it; a forked process gets connections of its own."""

    def __init__(self, registry: str, repository: str, access: Access) -> None:
        self.access = access
        self._registry = registry
        self._repository = repository
        host = _DOCKER_HUB_HOST if registry == DOCKER_HUB else registry
        self._origin = f"{'http' if access.plain_http else 'https'}://{host}"
        self.base = f"{self._origin}/v2/{repository}/"
        self._link = _Link(_make_pool(self._origin, access))

    def __str__(self) -> str:
        return f"{self._registry}/{self._repository}"

    def _current_link(self) -> _Link:
        if self._link.pid != os.getpid():
            self._link = _Link(_make_pool(self._origin, self.access))
        return self._link

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
        limit_bytes: int = _MAX_ANSWER_BYTES,
    ) -> Answer:
        """Make a request that may be repeated; return the first answer that does not call for a retry.

        Raises:
            RegistryError: if there is no such answer.
        """
        for failures in count(1):
            response = self.open_retrying(method, url, headers, body=body)
            try:
                return self.read(response, url, limit_bytes)
            except HTTPError as error:
                if failures >= self.access.attempts:
                    raise self.unreachable(error) from error
                self.pause(failures)
        raise AssertionError

    def open_retrying(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, *, body: Body | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Make a request as `send` does, but leave the answer's content unread.

        Raises:
            RegistryError: if there is no answer.
        """
        for failures in count(1):
            try:
                response = self.open(method, url, headers, body=body)
            except HTTPError as error:
                if failures >= self.access.attempts or isinstance(error, _FINAL_ERRORS):
                    raise self.unreachable(error) from error
                self.pause(failures)
            else:
                if response.status not in RETRIED or failures >= self.access.attempts:
                    return response
                response.close()
                self.pause(failures, response.headers)
        raise AssertionError

    def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
        timeout_s: float = 0,
    ) -> urllib3.BaseHTTPResponse:
        """Make a request once, or once more with the authorization that the registry asks for.

        Raises:
            HTTPError: if there is no answer.
            RegistryError: if that authorization cannot be obtained.
        """
        link = self._current_link()
        authorization = link.authorization
        response = self._request(method, url, headers, body, timeout_s, authorization)
        for _ in range(2):  # the first may send what another thread has just obtained for another purpose
            if response.status != 401:
                break
            try:
                is_new = self._authorize(link, response, authorization)
            except BaseException:
                response.close()
                raise
            if not is_new:
                break
            response.close()
            authorization = link.authorization
            response = self._request(method, url, headers, body, timeout_s, authorization)
        return response

    def _request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: Body | None,
        timeout_s: float,
        authorization: str,
    ) -> urllib3.BaseHTTPResponse:
        for _ in range(_MAX_REDIRECTS):
            if not url.startswith(("https://", "http://") if self.access.plain_http else "https://"):
                raise RegistryError(
                    f"{self}: the registry leads to {url[:200]!r}, which has no TLS",
                    hint="have its external URL set right, or allow it (--plain-http, a remote's plain_http=yes)",
                )
            sent = {"User-Agent": f"ocihook/{__version__}", "Accept-Encoding": "identity", **(headers or {})}
            if authorization and url.startswith(f"{self._origin}/"):
                sent["Authorization"] = authorization
            response = self._current_link().pool.request(
                method,
                url,
                body=body() if body else None,
                headers=sent,
                redirect=False,
                retries=False,
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=timeout_s or self.access.timeout_s),
                preload_content=False,
            )
            location = response.headers.get("Location")
            if method not in ("GET", "HEAD") or response.status not in _REDIRECTS or not location:
                return response
            response.close()
            url = urljoin(url, location)
            headers = {key: value for key, value in (headers or {}).items() if key != "Authorization"}
        raise RegistryError(f"{self}: the registry leads nowhere, but to {url[:200]!r}", hint=TRY_ANOTHER)

    def read(self, response: urllib3.BaseHTTPResponse, url: str, limit_bytes: int = _MAX_ANSWER_BYTES) -> Answer:
        """Read all of an answer to a request for `url`.

        Raises:
            HTTPError: if the connection breaks.
            RegistryError: if it is larger than the limit.
        """
        try:
            data = response.read(limit_bytes + 1)
            if len(data) > limit_bytes:
                raise RegistryError(f"{self}: an answer of the registry has no end", hint=TRY_ANOTHER)
            response.release_conn()
        finally:
            response.close()
        return Answer(response.status, response.headers, data, url)

    def pause(self, failures: int, headers: Mapping[str, str] | None = None) -> None:
        """Wait before the next attempt, as long as the registry asks for.

        Raises:
            RegistryError: if it asks for more than a minute.
        """
        asked_s = _retry_after_s((headers or {}).get("Retry-After", ""))
        if asked_s > _MAX_RETRY_AFTER_S:
            raise RegistryError(
                f"{self}: the registry takes no request for the next {asked_s:.0f} s",
                hint="try again then; what has been sent is not sent again",
            )
        pause_s = min(self.access.backoff_s * 2 ** (failures - 1), _MAX_PAUSE_S)
        pause_s *= random.uniform(0.5, 1)  # noqa: S311 - so that many nodes do not retry all at once
        # waits: a session does this in a process of its own, and has patience with that
        time.sleep(max(pause_s, asked_s))

    def _authorize(self, link: _Link, response: urllib3.BaseHTTPResponse, refused: str) -> bool:
        """Obtain the authorization that the registry asks for in place of a refused one; False if there is no other."""
        with link.lock:
            if link.authorization == refused:
                link.authorization = self._new_authorization(link, response.headers.getlist("WWW-Authenticate"))
            return link.authorization not in ("", refused)

    def _new_authorization(self, link: _Link, challenges: list[str]) -> str:
        credentials = find_credentials(self._registry, self._repository, self.access.auth_file)
        for challenge in challenges:
            scheme, _, parameters = challenge.strip().partition(" ")
            if scheme.lower() == "bearer":
                return "Bearer " + self._token(link, dict(_PARAMETER.findall(parameters)), credentials)
        return credentials.basic if credentials else ""

    def _token(self, link: _Link, challenge: Mapping[str, str], credentials: Credentials | None) -> str:
        mine = f"repository:{self._repository}:"
        scope = challenge.get("scope", "")
        if scope.startswith(mine):  # a token for one purpose must not remove the scope that another thread needs
            link.actions.update(scope.removeprefix(mine).split(","))
            scope = mine + ",".join(sorted(link.actions))
        query = {key: value for key, value in {"service": challenge.get("service"), "scope": scope}.items() if value}
        realm = challenge.get("realm", "")
        if credentials and credentials.refresh_token:
            form = {"grant_type": "refresh_token", "refresh_token": credentials.refresh_token, "client_id": "ocihook"}
            data = urlencode({**form, **query}).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(data))}
            answer = self._ask_for_token("POST", realm, headers, lambda: [data])
        else:
            headers = {"Authorization": credentials.basic} if credentials else {}
            joint = "&" if urlsplit(realm).query else "?"
            answer = self._ask_for_token("GET", f"{realm}{joint}{urlencode(query)}", headers, None)
        try:
            value = json.loads(answer.data)
            token = value.get("token") or value.get("access_token")
        except (ValueError, RecursionError, AttributeError):
            token = None
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise RegistryError(f"{self}: {realm} gave no token", hint=TRY_ANOTHER)
        return token

    def _ask_for_token(self, method: str, url: str, headers: Mapping[str, str], body: Body | None) -> Answer:
        for failures in count(1):
            try:
                answer = self.read(self._request(method, url, headers, body, 0, ""), url)
            except HTTPError as error:
                if failures >= self.access.attempts or isinstance(error, _FINAL_ERRORS):
                    raise self.unreachable(error) from error
                self.pause(failures)
                continue
            if answer.status == 200:
                return answer
            if answer.status not in RETRIED or failures >= self.access.attempts:
                self.fail(answer, "a token")
            self.pause(failures, answer.headers)
        raise AssertionError

    def unreachable(self, error: Exception) -> RegistryError:
        """Return what to raise when there is no answer."""
        text = str(error).partition("): ")[2] or str(error)
        hint = "check its name and port, the network, and proxies in the environment"
        if isinstance(error, SSLError):
            hint = "name the file of its CA (--ca-file, a remote's ca_file=); use plain HTTP only if it has no TLS"
        return RegistryError(f"{self} cannot be reached: {text}", hint=hint)

    def fail(self, answer: Answer, what: str) -> NoReturn:
        """Raise the error that an unexpected answer means."""
        errors = "; ".join(f"{code} {message}".strip() for code, message in answer.errors())[:300]
        text, hint = _MEANINGS.get(answer.status, ("answers", ""))
        if answer.status in RETRIED:
            text, hint = "is not able to answer", "try again later; what has been sent is not sent again"
        message = f"{self}: the registry {text} ({what}: HTTP {answer.status}{', ' + errors if errors else ''})"
        raise RegistryError(message, status=answer.status, hint=hint)


def _retry_after_s(value: str) -> float:
    """Return the seconds that a Retry-After (RFC 9110, 10.2.3) names, as a number or as a time; 0 if it is neither."""
    if value.isdecimal():
        return float(value)
    try:
        return parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0


TRY_ANOTHER = "use another registry, or have this one repaired"
_LOG_IN = "log in with `podman login`, or name the file that has its credentials (--authfile, a remote's authfile=)"
_MEANINGS: Mapping[int, tuple[str, str]] = {
    401: ("asks for other credentials", _LOG_IN),
    403: ("does not allow it", f"have access granted, or {_LOG_IN}"),
    404: ("does not know it", "check the names of repository and tag"),
    405: ("does not offer it", "have it allowed in the registry's configuration"),
    413: ("takes nothing as large", "raise the limit of the registry, or of the proxy before it"),
}


def _make_pool(origin: str, access: Access) -> urllib3.PoolManager:
    context = ssl.create_default_context()
    if access.ca_file:
        try:
            context.load_verify_locations(access.ca_file)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"{access.ca_file} has no certificates that can be read: {reason(error)}") from error
    options: dict[str, Any] = {"num_pools": 8, "maxsize": 16, "ssl_context": context, "blocksize": 1 << 20}
    proxy = _proxy(origin)
    if not proxy:
        return urllib3.PoolManager(**options)
    auth = urllib3.util.parse_url(proxy).auth
    headers = urllib3.make_headers(proxy_basic_auth=unquote(auth)) if auth else None
    return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)


def _proxy(origin: str) -> str | None:
    parts = urlsplit(origin)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
