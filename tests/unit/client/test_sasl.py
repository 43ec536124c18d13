from __future__ import annotations

import base64
import hashlib
import hmac
import json

import pytest

from millrace.broker.client.sasl import (
    MAX_ITERATIONS,
    OAuthBearer,
    Plain,
    SaslFailure,
    Scram,
    is_extension,
    password_login,
)

# (hash, user, nonce, client first, server first, client final, server final): RFC 5802 section 5 and
# RFC 7677 section 3.
VECTORS = [
    (
        "sha1",
        "fyko+d2lbbFgONRv9qkxdawL",
        "n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
        "r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
        "c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        "v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    ),
    (
        "sha256",
        "rOprNGfwEbeRWgbNEkqO",
        "n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        "p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ),
]


def scram(hash_name: str = "sha256", nonce: str = "mine", username: str = "user") -> Scram:
    return Scram("SCRAM-SHA-256", hash_name, username, "pencil", nonce=nonce)


@pytest.mark.parametrize(("hash_name", "nonce", "first", "server", "final", "verifier"), VECTORS)
def test_scram_says_what_the_rfcs_say(
    hash_name: str, nonce: str, first: str, server: str, final: str, verifier: str
) -> None:
    login = scram(hash_name, nonce)
    assert login.first().decode() == first
    assert login.answer(server.encode()).decode() == final
    assert not login.is_done
    assert login.answer(verifier.encode()) == b""
    assert login.is_done


def test_scram_sha_512_is_what_a_server_expects() -> None:
    # The server's side of RFC 5802, from its StoredKey alone: the proof is what the client key hides in.
    login = password_login("SCRAM-SHA-512", "user", "pencil")
    first = login.first().decode()
    nonce = first.split("r=")[1]
    server = f"r={nonce}theirs,s={base64.b64encode(b'salt').decode()},i=4096"
    final = login.answer(server.encode()).decode()
    salted = hashlib.pbkdf2_hmac("sha512", b"pencil", b"salt", 4096)
    stored = hashlib.sha512(hmac.digest(salted, b"Client Key", "sha512")).digest()
    message = f"{first[3:]},{server},{final.split(',p=')[0]}".encode()
    signature = hmac.digest(stored, message, "sha512")
    proof = base64.b64decode(final.split(",p=")[1])
    client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
    assert hashlib.sha512(client_key).digest() == stored
    server_key = hmac.digest(salted, b"Server Key", "sha512")
    login.answer(b"v=" + base64.b64encode(hmac.digest(server_key, message, "sha512")))
    assert login.is_done


def test_a_server_that_does_not_know_the_password_is_found_out() -> None:
    hash_name, nonce, _, server, _, _ = VECTORS[1]
    login = scram(hash_name, nonce)
    login.first()
    login.answer(server.encode())
    with pytest.raises(SaslFailure, match="impostor"):
        login.answer(b"v=" + base64.b64encode(bytes(32)))
    assert not login.is_done


@pytest.mark.parametrize(
    ("challenge", "words"),
    [
        (b"r=other,s=c2FsdA==,i=4096", "nonce"),
        (b"r=mine,s=c2FsdA==,i=4096", "nonce"),  # nothing of the server's own
        (b"r=mineyours,s=c2FsdA==,i=4095", "4095 iterations"),
        (f"r=mineyours,s=c2FsdA==,i={MAX_ITERATIONS + 1}".encode(), "iterations"),
        (b"r=mineyours,s=c2FsdA==,i=99999999999999999999", "iterations"),
        (b"r=mineyours,s=c2FsdA==", "iterations"),
        (b"r=mineyours,s=!,i=4096", "salt"),
        (b"r=mineyours,i=4096", "salt"),
        (b"m=new,r=mineyours,s=c2FsdA==,i=4096", "extension"),
        (b"e=unknown-user", "unknown-user"),
        (b"\xff\xfe", "no text"),
        (b"", "not one of SCRAM"),
        (b"hello", "not one of SCRAM"),
    ],
)
def test_scram_refuses_what_a_server_must_not_say(challenge: bytes, words: str) -> None:
    login = scram()
    login.first()
    with pytest.raises(SaslFailure, match=words):
        login.answer(challenge)


def test_scram_escapes_names() -> None:
    assert scram(username="a,b=c").first() == b"n,,n=a=2Cb=3Dc,r=mine"


def test_nonces_differ() -> None:
    assert (
        password_login("SCRAM-SHA-256", "a", "b").first() != password_login("SCRAM-SHA-256", "a", "b").first()
    )


def test_plain_is_one_message() -> None:
    login = Plain("user", "pässword")
    assert login.first() == "\0user\0pässword".encode()
    assert login.is_done
    with pytest.raises(SaslFailure):
        login.answer(b"more?")
    with pytest.raises(SaslFailure):
        Plain("user", "with\0nul")


def test_oauthbearer_carries_token_and_extensions() -> None:
    login = OAuthBearer("abc.def", {"logicalCluster": "lkc-1"})
    assert login.first() == b"n,,\x01auth=Bearer abc.def\x01logicalCluster=lkc-1\x01\x01"
    assert login.is_done
    assert login.answer(b'{"status":"invalid_token"}') == b"\x01"
    assert "invalid_token" in login.reason(0.0)


def test_oauthbearer_knows_an_expired_token() -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": 100}).encode()).decode().rstrip("=")
    login = OAuthBearer(f"e30.{claims}.x")
    assert login.reason(101.0) == "it has expired"
    assert "expired" not in login.reason(99.0)


@pytest.mark.parametrize("token", ["", "two words", "a\x01auth=b", "a\nb"])
def test_oauthbearer_sends_no_broken_token(token: str) -> None:
    with pytest.raises(SaslFailure) as failure:
        OAuthBearer(token)
    assert not token or token not in str(failure.value)


def test_extensions_cannot_forge_the_token() -> None:
    assert is_extension("traceId", "a b,c")
    assert not is_extension("auth", "Bearer other")
    assert not is_extension("name", "a\x01auth=Bearer other")
    with pytest.raises(SaslFailure):
        OAuthBearer("abc", {"auth": "Bearer other"})
