"""`tandem certs`: a development CA and a node's certificate, made with openssl."""

import subprocess
from pathlib import Path

from commands.config import CertsConfig
from common.errors import ConfigError
from common.internal_tls import check_readable
from common.rpc import TLS_NAME


def run(config: CertsConfig) -> int:
    make_certificates(config)
    return 0


def make_certificates(config: CertsConfig) -> None:
    """A CA and one node's certificate. An existing CA in the directory is used again."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    if config.ca is not None and Path(config.ca).resolve() != out.resolve():
        for name in ("ca.pem", "ca-key.pem"):
            (out / name).write_bytes(check_readable("--ca", Path(config.ca, name)))
    if not (out / "ca.pem").exists():
        subject = ("-subj", "/CN=Tandem development CA")
        days = ("-days", str(config.days))
        openssl(
            out, "req", "-x509", *KEY, "-keyout", "ca-key.pem", "-out", "ca.pem", *subject, *days
        )
    request = ("-keyout", "node-key.pem", "-out", "node.csr", "-subj", f"/CN={TLS_NAME}")
    names = [TLS_NAME] if config.role is None else [TLS_NAME, f"{config.role}.{TLS_NAME}"]
    alternative = ",".join(f"DNS:{name}" for name in names)
    openssl(out, "req", *KEY, *request, "-addext", f"subjectAltName={alternative}")
    signed = (
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca-key.pem",
        "-CAcreateserial",
        "-copy_extensions",
        "copy",
    )
    openssl(
        out,
        "x509",
        "-req",
        "-in",
        "node.csr",
        "-out",
        "node.pem",
        *signed,
        "-days",
        str(config.days),
    )
    (out / "node.csr").unlink()
    if config.ca is None:
        (out / "ca-key.pem").chmod(0o600)
    else:
        (out / "ca-key.pem").unlink()  # it stays where it is
    # of group 0, containers can read it, whatever user they run as
    (out / "node-key.pem").chmod(0o640)


KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(directory: Path, *arguments: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *arguments], cwd=directory, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            "tandem certs needs openssl; on Debian: apt-get install openssl"
        ) from None
    if done.returncode != 0:
        raise ConfigError(f"openssl failed: {done.stderr.strip().splitlines()[-1]}")
