"""An issuer of JWTs for tests: keys, documents, and tokens that are right or wrong in one thing."""

from __future__ import annotations

import base64
import hmac
import json
import time
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

ISSUER = "https://issuer.example"
AUDIENCE = "toolcell"


class Issuer:
    """Signs tokens, and answers as its web server would."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {"rsa": rsa.generate_private_key(65537, 2048)}
        self.asked: list[str] = []
        self.answers: dict[str, httpx.Response] = {}
        """In place of its own, by path."""

    def documents(self) -> dict[str, Any]:
        return {
            "/.well-known/openid-configuration": {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/keys"},
            "/keys": {"keys": [jwk_of(key, name) for name, key in self.keys.items()]},
        }

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if (given := self.answers.get(request.url.path)) is not None:
            return given
        return httpx.Response(200, json=self.documents()[request.url.path])

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    def sign(self, key: Any = None, *, alg: str = "RS256", headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a token; `claims` that are None are left out."""
        now = int(time.time())
        all_claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "anna",
            "tenant": "acme",
            "scope": "toolcell:execute toolcell:read",
            "iat": now,
            "exp": now + 300,
        } | claims
        given = {name: value for name, value in all_claims.items() if value is not None}
        key = self.keys["rsa"] if key is None else key
        return jwt.encode(given, key, algorithm=alg, headers={"kid": "rsa"} | (headers or {}))

    def with_public_key(self, claims: dict[str, Any]) -> str:
        """Return a token for which the public key served as a secret. The library refuses to make one."""
        head = unsigned({"iss": ISSUER, "aud": AUDIENCE, "sub": "anna"} | claims, {"alg": "HS256", "kid": "rsa"})[:-1]
        public = self.keys["rsa"].public_key()
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        signature = hmac.digest(pem, head.encode(), "sha256")
        return f"{head}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def unsigned(claims: dict[str, Any], header: dict[str, Any]) -> str:
    """Return a token without a signature."""

    def part(data: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")

    return f"{part(header)}.{part(claims)}."


def jwk_of(key: Any, name: str) -> dict[str, Any]:
    algorithm: Any = (
        jwt.algorithms.ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else jwt.algorithms.RSAAlgorithm
    )
    document: dict[str, Any] = json.loads(algorithm.to_jwk(key.public_key()))
    return document | {"kid": name, "use": "sig"}
