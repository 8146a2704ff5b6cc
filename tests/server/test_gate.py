"""Keys, request ids, and what the configuration allows."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from running_server import Server, Start, strict_json

from paceline.server.config import ServerConfig, read_api_keys

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/health/../metrics"),
    ("GET", "/HEALTH"),
]


async def test_every_route_but_health_needs_a_key(start: Start) -> None:
    server = await start(ServerConfig(api_keys=("first", "sécond")))
    bad = ["", "Bearer", "Bearer firs", "Bearer first2", "Basic first", "first", "Bearer none"]
    async with httpx.AsyncClient(base_url=server.url) as anyone:
        assert (await anyone.get("/health")).status_code == 200
        for method, path in ROUTES:
            response = await anyone.request(method, path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            error = strict_json(response.content)["error"]
            assert error["code"] == "invalid_api_key"
        for value in bad:
            response = await anyone.get("/v1/models", headers={"Authorization": value})
            assert response.status_code == 401, value
        for value in ("Bearer first", "bearer first"):
            assert (await anyone.get("/v1/models", headers={"Authorization": value})).status_code == 200
        second = "Bearer sécond".encode()
        assert (await anyone.get("/v1/models", headers={"Authorization": second})).status_code == 200
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    assert len((await server.client.models.list()).data) == 1


async def test_without_keys_everything_is_open(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url) as anyone:
        for path in ("/v1/models", "/version", "/metrics", "/health", "/openapi.json"):
            assert (await anyone.get(path)).status_code == 200
        assert strict_json((await anyone.get("/version")).content)["version"]


async def test_behind_a_prefix(start: Start) -> None:
    server = await start(ServerConfig(root_path="/llm", api_keys=("key",)))
    async with httpx.AsyncClient(base_url=server.url) as anyone:
        assert (await anyone.get("/health")).status_code == 200
        assert (await anyone.get("/metrics")).status_code == 401
    assert (await server.http.get("/v1/models")).status_code == 200
    assert '"/llm/openapi.json"' not in (await server.http.get("/openapi.json")).text
    assert "/llm/openapi.json" in (await server.http.get("/docs")).text


async def test_client_chosen_ids_are_only_echoed(start: Start) -> None:
    """failure 43: two open requests with one id of the client's do not meet."""
    server = await start(delay_s=0.002)
    headers = {"X-Request-Id": "same"}
    body = {"prompt": "hello", "max_tokens": 60, "seed": 1}
    first = asyncio.create_task(server.post("/v1/completions", body, headers=headers))
    await asyncio.sleep(0.03)
    second = asyncio.create_task(server.post("/v1/completions", {**body, "prompt": "dog"}, headers=headers))
    replies = await asyncio.gather(first, second)
    assert [reply.status_code for reply in replies] == [200, 200]
    assert [reply.headers["x-request-id"] for reply in replies] == ["same", "same"]
    assert replies[0].json()["id"] != replies[1].json()["id"]
    for reply, prompt in zip(replies, ("hello", "dog"), strict=True):
        alone = await server.ok("/v1/completions", **{**body, "prompt": prompt})
        assert reply.json()["choices"] == alone["choices"]
    await server.idle()


async def test_request_ids(server: Server) -> None:
    given = (await server.http.get("/health")).headers["x-request-id"]
    assert len(given) == 32
    for strange in (b"x" * 129, "naïve".encode(), b""):
        echoed = (await server.http.get("/health", headers={b"X-Request-Id": strange})).headers["x-request-id"]
        assert echoed.encode() != strange
    refused = await server.post("/v1/completions", {}, headers={"X-Request-Id": "mine"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine")


async def test_health_by_head_and_what_is_not_served(server: Server) -> None:
    response = await server.http.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert (await server.http.get(path)).status_code == 404


async def test_an_unexpected_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of the server's own is an answer like others: with an id, in the shape of errors, and counted."""

    async def fail(*_: object) -> None:
        raise RuntimeError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(server.service, "tokenize", fail)
        response = await server.post("/tokenize", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    error = strict_json(response.content)["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in response.text
    assert 'refused_requests_total{status="500"} 1.0' in (await server.http.get("/metrics")).text
    await server.canary()


def test_the_default_is_this_machine_alone() -> None:
    """failure 85: nothing listens on a wildcard address by default."""
    assert ServerConfig().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 70000),
        ("port", -1),
        ("root_path", "llm"),
        ("root_path", "/llm/"),
        ("api_keys", ("",)),
        ("api_keys", ("good", " bad")),
        ("served_model_names", ("",)),
        ("max_body_bytes", 0),
        ("max_prompts", 0),
        ("max_messages", 0),
        ("max_n", 129),
        ("max_n", 0),
        ("max_logprobs", 21),
        ("max_logprobs", -1),
        ("max_waiting", 0),
        ("max_concurrent", 0),
        ("tokenizer_threads", 0),
        ("body_timeout_s", 0),
        ("exit_timeout_s", -1),
        ("exit_timeout_s", float("inf")),
        ("body_timeout_s", float("nan")),
        ("drain_timeout_s", float("inf")),
        ("drain_timeout_s", -1),
        ("drain_timeout_s", float("nan")),
    ],
)
def test_bad_configurations(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        ServerConfig(**{field: value})  # type: ignore[arg-type]


def test_key_files(tmp_path: Path) -> None:
    """A file without a key is an error: it must not leave the server open."""
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta  \n")
    assert read_api_keys(file) == ("alpha", "beta")
    for text in ("", "# nothing\n\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="no key"):
            read_api_keys(file)
    with pytest.raises(ValueError, match="cannot read"):
        read_api_keys(tmp_path / "missing")
