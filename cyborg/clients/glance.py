# SPDX-License-Identifier: Apache-2.0
"""Client of Glance: read the metadata and the data of images.

Redirects are refused. See the reference at https://docs.openstack.org/api-ref/image/v2/.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

from oslo_config import cfg
from urllib3.exceptions import HTTPError, ReadTimeoutError

from cyborg.clients.service_client import ServiceClient, credentials_error, describe, load_adapter
from cyborg.core.errors import Forbidden, Invalid, NotFound, TimedOut, Unavailable
from cyborg.core.image import ImageMetadata, parse_metadata

MAX_METADATA = 1 << 20  # bytes of a response with metadata
CHUNK = 1 << 18  # bytes of data that are read at once, at most

# The catalog may have the endpoint with the version or without it.
_VERSION = re.compile(r"/v\d+(\.\d+)?$")


class Glance(ServiceClient):
    """Client of Glance with the calls that an agent needs.

    Each method raises Unavailable if Glance cannot be reached, fails or rejects the credentials,
    TimedOut if it does not answer in time, NotFound if there is no such image or the user may not
    read it, Forbidden if the policy of Glance refuses the request, and Invalid for any other
    rejection.
    """

    SERVICE = "Glance"

    @property
    def auth(self) -> Any:
        """Return the authentication plug-in."""
        return self._adapter.auth or self._adapter.session.auth

    def get_image(self, uuid: str) -> ImageMetadata:
        """Return the metadata of an image."""
        image = _parse(self._read(f"images/{uuid}"))
        if image.uuid != uuid:
            raise Unavailable(f"unexpected response from Glance: image {image.uuid}, not {uuid}")
        return image

    def list_images(self, filters: Mapping[str, str], limit: int) -> list[ImageMetadata]:
        """Return the first page of the images whose attributes or properties equal the filters."""
        body = self._read(f"images?{urlencode({**filters, 'limit': str(limit)})}")
        rows = body.get("images") if isinstance(body, Mapping) else None
        if not isinstance(rows, list):
            raise Unavailable("unexpected response from Glance: no list of images")
        return [_parse(row) for row in rows[:limit]]

    @contextmanager
    def download(self, uuid: str) -> Iterator[Iterator[bytes]]:
        """Request the data of an image; yield its chunks as they arrive, each not empty.

        The timeout of the client is the maximum time without data. The number of bytes is not
        checked.
        """
        path = f"images/{uuid}/file"
        # Compressed data could be much larger than the body of the response.
        response = self._open(path, {"Accept-Encoding": "identity"})
        try:
            if response.status_code != 200:
                # 204: the image has no data. 206 is a part of the data.
                raise Invalid(f"Glance answered {response.status_code} to GET {path}, expected 200")
            if encoding := response.headers.get("Content-Encoding"):
                raise Invalid(f"Glance sent data with the encoding {encoding:.40}, expected none")
            yield self._chunks(response)
        finally:
            response.close()

    def project_id(self) -> str | None:
        """Return the project of the credentials, None if they have none."""
        project = self._ask_keystone(self._adapter.get_project_id)
        return str(project) if project else None

    def _read(self, path: str) -> Any:
        """Return the body of a response. The timeout applies to the whole body."""
        end = time.monotonic() + self.timeout
        response = self._open(path, {"Accept": "application/json"})
        try:
            if response.status_code != 200:
                raise Invalid(f"Glance answered {response.status_code} to GET {path}, expected 200")
            # In chunks, so that neither a slow nor a large body exceeds its limit unnoticed.
            body = bytearray()
            for chunk in self._chunks(response, decode=True):
                body += chunk
                if len(body) > MAX_METADATA:
                    raise Unavailable(
                        f"unexpected response from Glance: more than {MAX_METADATA} bytes of "
                        "metadata"
                    )
                if time.monotonic() > end:
                    raise TimedOut(f"Glance did not finish its answer in {self.timeout:g} s")
            return json.loads(body)
        except ValueError as exc:
            raise Unavailable("unexpected response from Glance: not JSON") from exc
        finally:
            response.close()

    def _open(self, path: str, headers: Mapping[str, str]) -> Any:
        """Return a response whose body is not read yet. Raise an error for a status from 300 on."""
        response = self._request(
            "GET",
            f"{self._prefix()}{path}",
            headers=dict(headers),
            stream=True,
            # A redirect would send the token to another service.
            redirect=False,
            log=False,  # the log of keystoneauth reads the whole body
        )
        if response.status_code < 300:
            return response
        try:
            raise self._refusal(path, response)
        finally:
            response.close()

    def _prefix(self) -> str:
        """Return the path before ``images``: "/" if the endpoint has the version, else "/v2/"."""
        endpoint = self._ask_keystone(self._adapter.get_endpoint) or ""
        return "/" if _VERSION.search(urlsplit(endpoint).path.rstrip("/")) else "/v2/"

    def _chunks(self, response: Any, *, decode: bool = False) -> Iterator[bytes]:
        # read1 returns what has arrived. read and iter_content wait for a full chunk, so that a
        # slow server could keep the caller from ever looking at the clock.
        try:
            while chunk := response.raw.read1(CHUNK, decode_content=decode):
                yield chunk
        except ReadTimeoutError as exc:
            raise TimedOut(f"Glance sent no data for {self.timeout:g} s") from exc
        except (HTTPError, OSError) as exc:
            raise Unavailable(f"the connection to Glance broke: {exc}") from exc

    def _refusal(self, path: str, response: Any) -> Exception:
        """Return the error for a response that has no image."""
        status = response.status_code
        message = f"Glance answered {status} to GET {path}"
        if status < 400:
            return Invalid(
                f"{message}, a redirect, which is refused: set [glance] endpoint_override to the "
                "place of the images",
                status=status,
            )
        if status == 401:
            return credentials_error("Glance", self._credentials, message)
        if status == 403:
            return Forbidden(f"{message}: {self._credentials} may not read it", status=status)
        if status == 404:
            return NotFound(message, status=status)
        # These may succeed later; a repetition of any other rejected request is rejected too.
        if status >= 500 or status in (408, 429):
            return Unavailable(message, status=status)
        return Invalid(message, status=status)


def make(conf: cfg.ConfigOpts) -> Glance:
    """Create the client from section [glance]. Raise Misconfigured if it is unusable."""
    return Glance(
        load_adapter(conf, "glance"), conf.glance.request_timeout, describe(conf, "glance")
    )


def _parse(body: Any) -> ImageMetadata:
    try:
        return parse_metadata(body)
    except Invalid as exc:
        raise Unavailable(f"unexpected response from Glance: {exc.message}") from exc
