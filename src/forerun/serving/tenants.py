"""API keys and their tenants; drafter memories and queues are separate for each tenant."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import shlex
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from forerun.errors import DataError
from forerun.serving.errors import ApiError

KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what RFC 6750 allows after "Bearer"
TENANT = re.compile(r"[\w.@-]+")  # no space, so that it is no name of an unnamed key
SHARED_TENANT = ""  # of a server without keys


class Keys:
    """The API keys of a server, stored as digests."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._tenants = [(_digest(key), tenant) for tenant, key in pairs]

    def __len__(self) -> int:
        return len(self._tenants)

    @classmethod
    def read(cls, lines: Iterable[str]) -> Keys:
        """Keys from lines "tenant:key" or "key"; a line with "#" first is a comment.

        Raises DataError for any other line.
        """
        pairs: list[tuple[str, str]] = []
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            tenant, colon, key = text.partition(":")
            tenant, key = (tenant.strip(), key.strip()) if colon else (f"key {number}", text)
            if not KEY.fullmatch(key) or colon and not TENANT.fullmatch(tenant):
                raise DataError(
                    f"line {number} of the API keys must be TENANT:KEY or KEY, without spaces, "
                    "quotes and comments; a key has letters, digits and - . _ ~ + / with = at its "
                    "end only, in ASCII"
                )
            if any(key == other for _, other in pairs):
                raise DataError(
                    f"line {number} of the API keys repeats a key; use a key for one tenant only"
                )
            pairs.append((tenant, key))
        return cls(pairs)

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Keys from a file, one per line. Raises DataError."""
        try:
            keys = cls.read(path.read_text("utf-8-sig").splitlines())
        except (OSError, UnicodeDecodeError) as cause:
            reason = getattr(cause, "strerror", None) or "it is not UTF-8 text"
            raise DataError(f"cannot read API keys from {path}: {reason}; check the path") from None
        if not len(keys):
            raise DataError(f"{path} holds no API key; write one per line, as TENANT:KEY")
        return keys

    @staticmethod
    def exposure(path: Path) -> str:
        """A warning if other users may read or change the file, else ""."""
        found = path.stat()
        if os.name != "posix" or not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o077:
            return ""
        mode = stat.S_IMODE(found.st_mode)
        return (
            f"{path} has mode {mode:o}: other users of this machine may read the API keys; run "
            f"`chmod 600 {shlex.quote(str(path))}`"
        )

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header. Raises ApiError 401 without a known key."""
        if not self._tenants:
            return SHARED_TENANT
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise ApiError(
                401,
                "this server needs an API key; send the header `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
        digest, found = _digest(given.strip()), None
        for known, tenant in self._tenants:  # no early exit: constant time
            if hmac.compare_digest(digest, known):
                found = tenant
        if found is None:
            raise ApiError(401, "unknown API key", code="invalid_api_key")
        return found

    def check_operator(self, authorization: str | None, operators: Collection[str]) -> None:
        """Raises ApiError unless this key may see counts of all tenants.

        Without keys everybody may, else the `operators`, or the only tenant.
        """
        tenant = self.tenant(authorization)
        if len(self.names) > 1 and tenant not in operators:
            raise ApiError(
                403,
                "these counts cover all tenants; use the key of an operator (`forerun serve "
                "--operator TENANT`)",
                code="operator_only",
            )

    @property
    def names(self) -> set[str]:
        """The tenants."""
        return {tenant for _, tenant in self._tenants}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
