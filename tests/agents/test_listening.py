"""Who can reach the gateway, and what is refused: plain HTTP is for this machine alone."""

import ssl
import subprocess
import urllib.error
import urllib.request
from functools import partial

import openai
import pytest

from april import config as configuration
from april.agents.host import StartProgram
from april.agents.listening import AttachKey, server_tls
from april.config import AgentSection, ConfigError
from tests.support.agent_gateway import SESSION, over_tls
from tests.support.certificates import make_attach_key, make_certificate


@pytest.fixture
def certificate(tmp_path):
    return make_certificate(tmp_path)


@pytest.fixture
def section(certificate):
    """section(**more) -> AgentSection that is reached over TLS"""
    files = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    return lambda **more: AgentSection(**files | more)


@pytest.fixture
def attach_keyfile(tmp_path):
    return make_attach_key(tmp_path)


def ask(client):
    reply = client.chat.completions.create(model="run", messages=[{"role": "user", "content": "12*3="}])
    return reply.choices[0].message.content


def test_remote_clients_use_tls_and_local_programs_plain_http(meet, section, certificate):
    client, _, session, gateway = meet("11", "2", section=section())
    addresses = meet.addresses
    assert addresses.public.startswith("https://127.0.0.1:") and addresses.local.startswith("http://127.0.0.1:")
    for url in (addresses.public, addresses.public.replace("127.0.0.1", "localhost")):
        with over_tls(client, url, certificate[0]) as one:
            assert ask(one.with_options(api_key=gateway.admit(session))) == "11"
    near = client.with_options(api_key=gateway.admit(session))
    assert ask(near) == "11" and ask(near) == "2"
    for stranger in (addresses.public, addresses.public.replace("https", "http")):
        with pytest.raises(openai.APIConnectionError):
            ask(client.with_options(base_url=stranger))


def test_a_harness_needs_the_attach_key_and_gets_the_public_address(meet, section, certificate, attach_keyfile, loop):
    public = "https://agents.example.org"
    attached = section(attach=True, attach_keyfile=attach_keyfile, public_url=f"{public}/", listen="127.0.0.1:0")
    client, _, session, gateway = meet(attached=True, section=attached)
    assert meet.addresses.public == f"{public}/v1" and meet.addresses.local.startswith("https://127.0.0.1:")
    order = StartProgram(SESSION, meet.addresses.local, gateway.admit(session), {}, False, meet.addresses.public)
    loop.call_soon_threadsafe(meet.runner.start_program, order)
    trust = ssl.create_default_context(cafile=certificate[0])

    def come(key):
        request = urllib.request.Request(
            f"{meet.addresses.local}/sessions", b'{"wait_s": 30}', {"Authorization": f"Bearer {key}"}
        )
        return urllib.request.urlopen(request, timeout=60, context=trust).status

    for key in ("", client.api_key, 31 * "k"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            come(key)
    assert come(32 * "k") == 201 and gateway.refusals == {"invalid_api_key": 3}


def status_of(meet, path, body=None, **headers):
    """HTTP status of a request of the API."""
    request = urllib.request.Request(meet.addresses.local + path, body, {"Content-Type": "text/plain", **headers})
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_web_page_takes_no_sessions(meet, loop):
    client, _, session, gateway = meet(attached=True, section=AgentSection(attach=True))
    order = StartProgram(SESSION, meet.addresses.local, gateway.admit(session), {}, False, meet.addresses.public)
    loop.call_soon_threadsafe(meet.runner.start_program, order)

    status, wait = partial(status_of, meet), b'{"wait_s": 30}'
    known, made_up = f"Bearer {client.api_key}", "Bearer 3.1.1.guessed"
    others, rebound = {"Origin": "http://evil.example"}, {"Host": "evil.example"}
    for page in (others, {"Origin": "null"}, rebound, others | rebound):
        assert status("/sessions", wait, **page) == status("/models", **page) == status("/session", **page) == 403
        page = page | {"Authorization": made_up}
        assert status("/sessions", wait, **page) == status("/models", **page) == 403
        assert status("/session", **page) == (401 if "Host" in page else 403)
    assert status("/session", Authorization=known, **others) == 403
    assert status("/sessions", wait) == 201


def test_a_proxy_that_sets_a_host_of_its_own_reaches_the_api_with_a_key(meet, attach_keyfile):
    client, *_ = meet(attached=True, section=AgentSection(attach=True, attach_keyfile=attach_keyfile))
    for key, path, body, answer in (
        (client.api_key, "/session", None, 200),
        (client.api_key, "/models", None, 200),
        (client.api_key, "/sessions", b"{}", 401),
        (attach_keyfile.read_text().strip(), "/sessions", b"{}", 204),
        (31 * "k", "/sessions", b"{}", 403),
    ):
        assert status_of(meet, path, body, Host="agents", Authorization=f"Bearer {key}") == answer


BEYOND = ["--agent.listen", "0.0.0.0:8443"]
FILES = ["--agent.ssl_certfile", "april.pem", "--agent.ssl_keyfile", "april-key.pem"]
PROXY = ["--agent.public_url", "https://agents.example.org/one"]


@pytest.mark.parametrize(
    "overrides, says",
    [
        (BEYOND, r"'agent.listen' = '0.0.0.0:8443' would carry keys over the network unencrypted; give agent.ssl_cert"),
        ([*BEYOND, "--agent.public_url", "http://127.0.0.1:1"], "'agent.listen' = .* unencrypted"),
        (FILES[:2], r"'agent.ssl_certfile' = '/.*april.pem' needs agent.ssl_keyfile beside it"),
        (FILES[2:], r"'agent.ssl_keyfile' = '/.*april-key.pem' needs agent.ssl_certfile beside it"),
        (["--agent.public_url", "http://10.0.0.5:80"], "'agent.public_url' = 'http://10.0.0.5:80' is no addr"),
        (["--agent.public_url", "agents.example.org"], "'agent.public_url' = 'agents.example.org' is no addr"),
        (PROXY, r"'agent.listen' = '127.0.0.1:0' takes any port"),
    ],
)  # fmt: skip
def test_unencrypted_listening_beyond_this_machine_is_refused(config_file, overrides, says):
    with pytest.raises(ConfigError, match=says):
        configuration.load(config_file, ["--agent.program", "my_agent:run", *overrides])


@pytest.mark.full
@pytest.mark.parametrize("overrides", [[*BEYOND, *FILES], [*BEYOND, *PROXY], ["--agent.listen", "127.0.0.1:1", *PROXY]])
def test_a_public_attach_api_without_a_key_is_refused(config_file, overrides):
    assert configuration.load(config_file, ["--agent.program", "my_agent:run", *overrides])
    attached = ["--agent.attach", "true", *overrides]
    with pytest.raises(ConfigError, match=r"'agent.attach' = true"):
        configuration.load(config_file, attached)
    assert configuration.load(config_file, [*attached, "--agent.attach_keyfile", "harness.key"])


@pytest.mark.full
def test_files_that_are_no_certificate_and_no_key_are_named(section, certificate, attach_keyfile, tmp_path):
    _, key = certificate
    locked = tmp_path / "locked.pem"
    subprocess.run(["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked], check=True)
    for more, says in (
        ({"ssl_keyfile": tmp_path / "none"}, "'agent.ssl_keyfile' = .*No such file"),
        ({"ssl_certfile": key}, "'agent.ssl_certfile' = .* is no certificate of the key in"),
        ({"ssl_keyfile": locked}, "is no certificate of the key in .*without a passphrase"),
        ({"ssl_keyfile": attach_keyfile}, "is no certificate of the key in"),
    ):
        with pytest.raises(ConfigError, match=says):
            server_tls(section(**more))
    attach_keyfile.chmod(0o640)
    with pytest.raises(ConfigError, match=r"'agent\.attach_keyfile' .*chmod 600"):
        AttachKey(attach_keyfile)
    attach_keyfile.chmod(0o600)
    attach_keyfile.write_text("short")
    with pytest.raises(ConfigError, match=r"'agent\.attach_keyfile' .*32 characters"):
        AttachKey(attach_keyfile)
    with pytest.raises(ConfigError, match=r"'agent\.attach_keyfile' .*cannot be read .*openssl"):
        AttachKey(tmp_path / "none")
