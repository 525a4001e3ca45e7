"""mTLS between Tandem's processes: one CA, one directory with a certificate for each process.

    tandem certs --out DIR          a development CA and a node's certificate, made with openssl
    tandem certs --out DIR2 --ca DIR        another certificate of that CA
    --internal-tls DIR              of router and workers: both show a certificate of that CA

The directory holds `ca.pem`, `node.pem` and `node-key.pem`. Certificates name `tandem-internal`,
not hosts, since workers come and go under any address. One that also names a part
(`router.tandem-internal`, from `tandem certs --role router`) is good for that part only; one that
names none may take any.
Files are read again when they change: a server looks at each handshake, a client whenever it
opens a stream.
"""

import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from common.errors import ConfigError
from common.rpc import TLS_NAME, GrpcPeer

FILES = ("ca.pem", "node.pem", "node-key.pem")


@dataclass(frozen=True, slots=True)
class InternalTls:
    directory: Path

    @staticmethod
    def of(directory: str | None) -> "InternalTls | None":
        """Raises ConfigError when a file is missing, cannot be read, or is no good."""
        if directory is None:
            return None
        missing = [name for name in FILES if not _exists(Path(directory, name))]
        if missing:
            raise ConfigError(
                f"--internal-tls {directory}: {', '.join(missing)} missing; "
                f"for development, make them with: tandem certs --out {directory}"
            )
        found = InternalTls(Path(directory))
        for name in FILES:
            check_readable("--internal-tls", Path(directory, name))
        check_pair("--internal-tls", Path(directory, "node.pem"), Path(directory, "node-key.pem"))
        return found

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file does."""
        return tuple((self.directory / name).stat().st_mtime_ns for name in FILES)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        ca, certificate, key = ((self.directory / name).read_bytes() for name in FILES)
        return ca, certificate, key

    def channel_credentials(self) -> grpc.ChannelCredentials:
        ca, certificate, key = self._read()
        return grpc.ssl_channel_credentials(
            root_certificates=ca, private_key=key, certificate_chain=certificate
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        seen = self.stamp()

        def configuration() -> grpc.ServerCertificateConfiguration:
            ca, certificate, key = self._read()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

        def configuration_if_changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen
            try:
                now = self.stamp()
                if now == seen:
                    return None
                found = configuration()
            except OSError:
                return None  # being replaced: the next handshake looks again
            seen = now
            return found

        return grpc.dynamic_ssl_server_credentials(
            configuration(), configuration_if_changed, require_client_authentication=True
        )

    def connect(self, address: str) -> GrpcPeer:
        """As `common.rpc.connect`, over TLS."""
        return GrpcPeer(address, self)


def _exists(path: Path) -> bool:
    """True also for what may not be looked at: reading it will tell."""
    try:
        return path.exists()
    except PermissionError:
        return True


def check_readable(option: str, path: Path) -> bytes:
    """Raises ConfigError, naming the option and the file."""
    try:
        return path.read_bytes()
    except PermissionError:
        raise ConfigError(
            f"{option}: {path} may not be read by user {os.geteuid()}; containers run in group 0, "
            f"so for them: chgrp 0 {path.name} && chmod 640 {path.name}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}") from None


def check_pair(option: str, certificate: Path, key: Path) -> None:
    """Raises ConfigError when they are no certificate and its private key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{option}: {certificate} and {key} are no certificate chain (PEM) and its private "
            f"key: {reason}"
        ) from None


CALLERS = {
    "Watch": "router",
    "Session": "router",
    "SelfTest": "router",
    "Link": "decode",
    "Handoff": "decode",
}
"""Who may call a worker's methods."""


def may_call(method: str, names: Iterable[str]) -> bool:
    """Whether the holder of a certificate with these names may call the method."""
    suffix = f".{TLS_NAME}"
    parts = {name.removesuffix(suffix) for name in names if name.endswith(suffix)}
    return not parts or CALLERS.get(method) in parts
