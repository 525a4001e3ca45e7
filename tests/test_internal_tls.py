"""mTLS between processes: who has a certificate of the CA is heard, nobody else; new files are
read.
"""

import asyncio
import contextlib
import os
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands.certificates import make_certificates
from commands.config import CertsConfig
from common.errors import ConfigError, NotAllowed, WorkerLost
from common.internal_tls import FILES, InternalTls, may_call
from common.messages import Watch
from common.rpc import Connect, RpcServer, Stream, connect, serve


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two CAs, strangers to each other."""
    made = (tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs"))
    for folder in made:
        make_certificates(CertsConfig(out=str(folder)))
    return made


def tls_of(folder: Path) -> InternalTls:
    found = InternalTls.of(str(folder))
    assert found is not None
    return found


async def echo(stream: Stream) -> None:
    message = await stream.receive()
    assert message is not None
    await stream.send(message)


async def ask(connect_with: Connect, server: RpcServer, method: str = "Echo") -> object:
    peer = connect_with(f"127.0.0.1:{server.port}")
    stream = peer.open(method)
    try:
        async with asyncio.timeout(10):
            await stream.send(Watch(protocol=7))
            return await stream.receive()
    finally:
        await peer.close()


async def serve_echo(tls: InternalTls) -> RpcServer:
    return await serve("127.0.0.1:0", {"Echo": echo}, tls.server_credentials())


def test_both_sides_need_a_certificate_of_the_same_ca(folders: tuple[Path, Path]) -> None:
    ours, theirs = folders

    async def main() -> None:
        server = await serve_echo(tls_of(ours))
        assert await ask(tls_of(ours).connect, server) == Watch(protocol=7)
        with pytest.raises(WorkerLost):
            await ask(tls_of(theirs).connect, server)
        with pytest.raises(WorkerLost):
            await ask(connect, server)
        await server.stop(0)

    asyncio.run(main())


def test_certificates_are_read_again_when_they_change(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    ours, theirs = folders

    async def main() -> None:
        copy_files(ours, tmp_path)
        tls = tls_of(tmp_path)
        server = await serve_echo(tls)
        peer = tls.connect(f"127.0.0.1:{server.port}")
        first = peer.open("Echo")
        await first.send(Watch(protocol=1))
        assert await first.receive() == Watch(protocol=1)
        copy_files(theirs, tmp_path)
        second = peer.open("Echo")
        await second.send(Watch(protocol=2))
        assert await second.receive() == Watch(protocol=2)
        await peer.close()
        with pytest.raises(WorkerLost):
            await ask(tls_of(ours).connect, server)
        await server.stop(0)

    asyncio.run(main())


def copy_files(source: Path, target: Path) -> None:
    for name in FILES:
        shutil.copyfile(source / name, target / name)


def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node-key\.pem missing; .*tandem certs --out"):
        InternalTls.of(str(tmp_path))
    assert InternalTls.of(None) is None


def test_t34_files_that_may_not_be_read_are_named(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    copy_files(folders[0], tmp_path)
    tmp_path.chmod(0o755)
    key = tmp_path / "node-key.pem"
    key.chmod(0)
    with as_somebody(tmp_path), pytest.raises(ConfigError, match=r"node-key\.pem may not be read"):
        InternalTls.of(str(tmp_path))
    key.chmod(0o600)
    key.write_text("no key")
    with pytest.raises(ConfigError, match=r"node\.pem and .*node-key\.pem are no certificate"):
        InternalTls.of(str(tmp_path))
    shutil.copyfile(folders[1] / "node-key.pem", key)
    with pytest.raises(ConfigError, match=r"node-key\.pem are no certificate"):
        InternalTls.of(str(tmp_path))
    key.unlink()
    key.mkdir()
    with pytest.raises(ConfigError, match=r"node-key\.pem: Is a directory"):
        InternalTls.of(str(tmp_path))


@contextlib.contextmanager
def as_somebody(folder: Path) -> Iterator[None]:
    """Not as root, who may read everything."""
    if os.geteuid() != 0:
        yield
        return
    for parent in folder.parents:
        if parent.stat().st_mode & 0o055 != 0o055 and parent.is_relative_to("/tmp"):
            parent.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_peer_whose_certificates_are_gone_is_lost_and_nothing_worse(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    async def main() -> None:
        copy_files(folders[0], tmp_path)
        peer = tls_of(tmp_path).connect("127.0.0.1:1")
        (tmp_path / "node.pem").unlink()
        with pytest.raises(WorkerLost, match="certificates"):
            peer.open("Echo")
        await peer.close()

    asyncio.run(main())


def test_t36_a_certificate_for_one_part_is_good_for_that_part_only(tmp_path: Path) -> None:
    folders = {}
    for role in ("router", "prefill", "decode"):
        folders[role] = tmp_path / role
        first = None if role == "router" else str(tmp_path / "router")
        make_certificates(CertsConfig(out=str(folders[role]), role=role, ca=first))
    assert not (folders["decode"] / "ca-key.pem").exists(), "the CA's key stays in one place"

    async def main() -> None:
        credentials = tls_of(folders["decode"]).server_credentials()
        server = await serve(
            "127.0.0.1:0", {"Session": echo, "Handoff": echo}, credentials, may_call
        )
        for role, method, is_allowed in (
            ("router", "Session", True),
            ("router", "Handoff", False),
            ("decode", "Handoff", True),
            ("decode", "Session", False),
            ("prefill", "Session", False),
            ("prefill", "Handoff", False),
        ):
            asked = ask(tls_of(folders[role]).connect, server, method)
            if is_allowed:
                assert await asked == Watch(protocol=7)
            else:
                with pytest.raises(NotAllowed, match=method):
                    await asked
        await server.stop(0)

    asyncio.run(main())
    assert may_call("Session", ["tandem-internal"]), "one that names no part may take any"


def test_keys_are_private_and_the_ca_is_kept(tmp_path: Path) -> None:
    make_certificates(CertsConfig(out=str(tmp_path)))
    ca = (tmp_path / "ca.pem").read_bytes()
    make_certificates(CertsConfig(out=str(tmp_path)))
    assert (tmp_path / "ca.pem").read_bytes() == ca
    for name, mode in (("ca-key.pem", 0o600), ("node-key.pem", 0o640)):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.load_cert_chain(tmp_path / "node.pem", tmp_path / "node-key.pem")
