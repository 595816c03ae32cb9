"""Encryption at rest: where a domain's keys come from, sealed records, and the cipher of a pack.

AES-256-GCM, with a key of its own for every record and every pack: HKDF-SHA256 of the domain's key and a random salt.
So no nonce is ever used twice: a record has one, a pack has its chunks' offsets. Byte tables in docs/formats.md.
"""

import hashlib
import os
import re
import secrets
import shlex
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ocihook.config import Settings
from ocihook.errors import ConfigError, IntegrityError, KeyMissing, plain, reason
from ocihook.packs.domain_names import check_domain_name

KEY_ID_BYTES = 8
SALT_BYTES = 16
TAG_BYTES = 16
_SEALED = b"OCIHSEAL"
_COMMAND_TIMEOUT_S = 30.0
_MAX_OUTPUT = 1 << 20
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_ZERO_NONCE = bytes(12)


class Key(NamedTuple):
    """256 bits, and the name that is written with what they encrypt."""

    id: bytes
    secret: bytes


class KeySource(NamedTuple):
    """Where keys come from: a file, or the output of a command; `{domain}` in either is the domain's name."""

    file: str = ""
    command: str = ""

    @classmethod
    def of(cls, settings: Settings) -> "KeySource":
        """Return what the node's configuration says."""
        return cls(settings.key_file, settings.key_command)


NO_KEYS = KeySource()


@dataclass
class Keyring:
    """The keys of one domain, loaded when the first is needed: the newest encrypts, all decrypt."""

    source: KeySource
    domain: str
    _keys: list[Key] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse a name that would be more than a name in a path or a command.

        Raises:
            StoreError: if it is not a name for a domain.
        """
        check_domain_name(self.domain)

    @property
    def is_configured(self) -> bool:
        """Return whether a source of keys is configured."""
        return any(self.source)

    @property
    def newest(self) -> Key:
        """Return the key to encrypt with.

        Raises:
            KeyMissing: if it cannot be got.
        """
        self._load()
        return self._keys[0]

    def get(self, key_id: bytes) -> Key:
        """Return the key with a name.

        Raises:
            KeyMissing: if it cannot be got.
        """
        self._load()
        for key in self._keys:
            if key.id == key_id:
                return key
        raise KeyMissing(
            f"domain {self.domain}: what was encrypted with key {key_id.hex()} cannot be read without it",
            hint="add that key below the newest one",
        )

    def _load(self) -> None:
        if self._keys:
            return
        if self.source.command:
            origin, text = "key_command", _output(self.source.command.replace("{domain}", self.domain))
        elif self.source.file:
            path = Path(self.source.file.replace("{domain}", self.domain))
            origin, text = str(path), _content(path)
        else:
            raise KeyMissing(f"domain {self.domain} is encrypted", hint="configure key_file or key_command")
        lines = [line.strip() for line in text.splitlines()]
        for line in lines:
            if line and not line.startswith("#"):
                if not _KEY.fullmatch(line):
                    raise ConfigError(f"{origin} of domain {self.domain}: a line is no key of 64 hexadecimal digits")
                secret = bytes.fromhex(line)
                self._keys.append(Key(_key_id(secret), secret))
        if not self._keys:
            raise KeyMissing(f"{origin} has no key for domain {self.domain}", hint="`openssl rand -hex 32` makes one")


def _key_id(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=KEY_ID_BYTES, person=b"ocihook key id").digest()


def _content(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyMissing(f"the key file {path} cannot be read: {reason(error)}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"the key file {path} is open to others than its owner", hint=f"chmod 600 {path}")
    return text


def _output(command: str) -> str:
    try:
        done = subprocess.run(
            shlex.split(command), capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode == 0 and len(done.stdout) < _MAX_OUTPUT:
            return done.stdout.decode()
        said = done.stderr[-500:].decode(errors="replace").strip() or "it printed no reason"
        raise KeyMissing(f"the key command {command!r} ended with status {done.returncode}: {said}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise KeyMissing(f"the key command {command!r} gave no key: {plain(error)}") from error


class _Aead:
    """AES-256-GCM with a key derived from a domain's."""

    def __init__(self, key: Key, salt: bytes, purpose: bytes) -> None:
        # Loaded where something is encrypted: it takes longer than all of the handler's own work.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self._aes = AESGCM(HKDF(SHA256(), 32, salt, purpose).derive(key.secret))
        self._errors = (InvalidTag, ValueError)

    def encrypt(self, nonce: bytes, data: bytes | memoryview, associated: bytes) -> bytes:
        return self._aes.encrypt(nonce, data, associated)

    def decrypt(self, nonce: bytes, data: bytes | memoryview, associated: bytes) -> bytes | None:
        """Return what was encrypted with this key, nonce and `associated`; None if that is not so."""
        try:
            return self._aes.decrypt(nonce, data, associated)
        except self._errors:
            return None


def is_sealed(data: bytes) -> bool:
    """Return whether a record is encrypted."""
    return data.startswith(_SEALED)


def key_id_of(record: bytes) -> bytes:
    """Return the name of the key that a record was sealed with; empty if it was not."""
    return record[len(_SEALED) : len(_SEALED) + KEY_ID_BYTES] if is_sealed(record) else b""


def seal(keyring: Keyring, name: str, data: bytes) -> bytes:
    """Return a record, encrypted so that it can be read under its own name only.

    Raises:
        KeyMissing: if there is no key.
    """
    key, salt = keyring.newest, secrets.token_bytes(SALT_BYTES)
    body = _Aead(key, salt, b"ocihook record").encrypt(_ZERO_NONCE, data, name.encode())
    return _SEALED + key.id + salt + body


def unseal(keyring: Keyring, name: str, data: bytes) -> bytes:
    """Return what was sealed under a name.

    Raises:
        KeyMissing: if its key is not there.
        IntegrityError: if it is damaged, or another one.
    """
    at = len(_SEALED) + KEY_ID_BYTES
    key, salt = keyring.get(data[len(_SEALED) : at]), data[at : at + SALT_BYTES]
    content = _Aead(key, salt, b"ocihook record").decrypt(_ZERO_NONCE, data[at + SALT_BYTES :], name.encode())
    if content is None:
        raise IntegrityError(f"the encrypted {name} is damaged, or was exchanged")
    return content


def opened(keyring: Keyring, name: str, data: bytes, *, must_be_sealed: Callable[[], bool]) -> bytes:
    """Return a record, unsealed if it is sealed.

    Raises:
        KeyMissing: if its key is not there.
        IntegrityError: if it is damaged, or another one, or not sealed and should be.
    """
    if is_sealed(data):
        return unseal(keyring, name, data)
    if must_be_sealed():
        raise IntegrityError(f"the {name} is not encrypted, as all of domain {keyring.domain} is")
    return data


class PackCipher:
    """Encrypts and decrypts the chunks of one pack."""

    def __init__(self, key: Key, salt: bytes) -> None:
        self.key_id, self.salt = key.id, salt
        self._aead = _Aead(key, salt, b"ocihook pack")

    @classmethod
    def new(cls, keyring: Keyring) -> "PackCipher":
        """Return the cipher of a new pack.

        Raises:
            KeyMissing: if there is no key.
        """
        return cls(keyring.newest, os.urandom(SALT_BYTES))

    def encrypt(self, offset: int, data: bytes | memoryview, associated: bytes) -> bytes:
        """Return the stored bytes of the chunk at an offset; to decrypt it, `associated` must be known."""
        return self._aead.encrypt(offset.to_bytes(12, "little"), data, associated)

    def decrypt(self, offset: int, stored: bytes | memoryview, associated: bytes) -> bytes | None:
        """Return what was encrypted; None if that was not with this key, at this offset, with the same `associated`."""
        return self._aead.decrypt(offset.to_bytes(12, "little"), stored, associated)


def permute(key: bytes, ids: bytes, *, back: bool = False) -> bytes:
    """Return page ids, 16 bytes each, enciphered with AES: they reveal only which are equal."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES(key), modes.ECB())  # noqa: S305 - of ids, whose equality is what is to be seen
    worker = cipher.decryptor() if back else cipher.encryptor()
    return worker.update(ids) + worker.finalize()
