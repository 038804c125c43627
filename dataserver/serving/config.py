"""Configuration of a server: a YAML file, overridden by flags. Paths stand here and nowhere else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from dataserver.addresses import expanded, is_loopback, split_address
from dataserver.dataset import DatasetError, is_url, location, usable_memory
from dataserver.job_files import read_values
from dataserver.planning.job.fields import Name, Version, required
from dataserver.planning.kernels.cache import user_cache
from dataserver.serving.budgets import LEAST_JOB_BYTES, MIB, budgets, default_decode_threads
from dataserver.tracing import Collector


class ConfigError(ValueError):
    """A configuration that no server can be started from; the message names the key."""


class Metavar(str):
    """What help shows for the value of a flag."""


def _any_given(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a list that was given and is empty, as of a variable that was never set: each server would plan alone."""
    if not addresses:
        raise ValueError(
            "it has no address; HOST:PORT of at least one server is required, or leave it out for a server alone"
        )
    return addresses


class ServerConfig(BaseModel):
    """Everything that an operator decides about one server. Each field is a flag of `serve`, with its docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, use_attribute_docstrings=True)

    datasets: dict[Name, Path] = {}
    """Dataset by the name that jobs use: its folder of shards, or its URL (docs/storage.md)."""
    index_dirs: dict[Name, Path] = {}
    """Folder of a dataset's index, if it is not beside the shards."""
    quarantines: dict[Name, Path] = {}
    """Quarantine list of a dataset, written by `dataserver lint`."""
    tokenizers: dict[Name, Path] = {}
    """Tokenizer by the name that jobs use: a file of Hugging Face, SentencePiece or tiktoken, or a folder with one. The
    byte-level tokenizer `bytes` is built in."""
    transforms: Annotated[dict[Name, Version], Metavar("NAME=VERSION")] = {}
    """Version of an installed transform of pixels that jobs may ask for (docs/transforms.md)."""
    transform_timeout_s: Annotated[int, Field(ge=1, le=3600)] = 30
    """Seconds that such a transform may take for an image. After that its process is killed, and the client asks
    again."""
    listen: Annotated[str, Metavar("HOST:PORT")] = "127.0.0.1:50051"
    """Address to serve on; port 0 takes a free one."""
    data_listen: Annotated[str | None, Metavar("HOST:PORT")] = None
    """Address of data connections, which carry payloads beside gRPC; port 0 takes a free one. By default the host is
    that of --listen, and the port is that + 1000, or a free one if it is taken."""
    metrics_listen: Annotated[str | None, Metavar("HOST:PORT")] = None
    """Address of metrics for Prometheus (HTTP, /metrics); port 0 takes a free one. By default there are none."""
    web_listen: Annotated[str | None, Metavar("HOST:PORT")] = None
    """Address of web pages that show this server, its --peers, its datasets and the steps of its jobs, like
    `dataserver web`; port 0 takes a free one. By default there are none."""
    web_hosts: Annotated[tuple[str, ...], Field(max_length=64), Metavar("NAME,...")] = ()
    """Names by which browsers reach the pages of --web-listen, besides this host's own name and addresses."""
    otlp_endpoint: Annotated[str | None, Metavar("URL")] = None
    """Collector of OpenTelemetry traces (OTLP over gRPC): http://HOST:PORT, or https://HOST:PORT with TLS. It gets
    what is done for the steps that trainers trace. By default nothing is sent."""
    peers: Annotated[
        tuple[str, ...], AfterValidator(expanded), AfterValidator(_any_given), Metavar("HOST:PORT,...")
    ] = ()
    """Other servers of the fleet, so that each step is planned by one of them. A host name may stand for
    several addresses, and HOST:FIRST-LAST for a range of ports. All servers can have the same list: each one ignores
    itself in it. Without a list this server plans every step itself; an empty list is refused."""
    tls_cert: Path | None = None
    """PEM file with this server's certificate, followed by those that signed it. With it, all connections are
    encrypted."""
    tls_key: Path | None = None
    """PEM file of the private key of --tls-cert. Only this user, or root, may be able to read it."""
    client_ca: Path | None = None
    """PEM file of authorities: every client then needs a certificate signed by one of them."""
    tls_ca: Path | None = None
    """PEM file of the authorities that sign the certificates of --peers. By default the one of --client-ca."""
    token_file: Path | None = None
    """File with lines NAME TOKEN: every call must then carry one of the tokens. Needs TLS, except on loopback
    addresses."""
    policy: Path | None = None
    """YAML file of identities with their datasets, rights and limits (docs/security.md). Without one, every client
    that is let in may do everything."""
    health_listen: Annotated[str | None, Metavar("HOST:PORT")] = None
    """Address for health checks alone, unencrypted and open to all, for probes of Kubernetes and load balancers."""
    insecure: bool = False
    """Listen on addresses that others can reach, even without encryption or authentication."""
    max_streams: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most streams that are open at once; further ones are refused."""
    idle_timeout_s: Annotated[int, Field(ge=1, le=86400)] = 600
    """Close streams idle for this many seconds, freeing their slots and memory. Clients reopen them when they want
    more."""
    stream_bytes: Annotated[int, Field(ge=1 * MIB, le=1 << 40)] = 256 * MIB
    """Largest microbatch in bytes. Every open stream may hold one; a stream for which there is no memory is refused."""
    prefetch_bytes: Annotated[int, Field(ge=0, le=1 << 44)] = Field(
        default_factory=lambda: budgets(usable_memory().num_bytes).prefetch_bytes
    )
    """Bytes that all streams together use to work ahead of their consumers. 1 GiB by default, less where memory is
    limited."""
    shared_memory: bool = True
    """By default, clients of the same user on this machine read microbatches from shared memory. --no-shared-memory
    sends them over the network, as to all other clients."""
    direct: bool = True
    """By default, clients read payloads over data connections, which cost less CPU time on both sides. --no-direct
    sends them over gRPC."""
    decode_threads: Annotated[int, Field(ge=1, le=1024)] = Field(default_factory=default_decode_threads)
    """Threads that decode images. One for each core by default, fewer where memory is limited."""
    job_bytes: Annotated[int, Field(ge=LEAST_JOB_BYTES, le=1 << 44)] = Field(
        default_factory=lambda: budgets(usable_memory().num_bytes).job_bytes
    )
    """Bytes cached for jobs, such as sizes of samples and plans; the least recently used go first. 1 GiB by default,
    less where memory is limited."""
    cache_dir: Path | None = Field(default_factory=lambda: user_cache())
    """Folder for statistics of datasets and compiled kernels; servers may share it. ~/.cache/disttrain by default."""
    block_memory_bytes: Annotated[int, Field(ge=0, le=1 << 44)] = Field(
        default_factory=lambda: min(1 << 30, usable_memory().num_bytes // 8)
    )
    """Bytes of memory for blocks of shards in an object store; local datasets need none. 1 GiB by default,
    less where memory is limited."""
    block_cache_dir: Path | None = None
    """Folder on a local disk for blocks of shards in an object store; servers of one user may share it. By default
    such blocks are in memory only."""
    block_cache_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 64 << 30
    """Most bytes that the files in --block-cache-dir may take."""
    zstd_level: Annotated[int, Field(ge=-7, le=19)] = 1
    """Zstandard level for clients that ask for compression."""
    drain_grace_s: Annotated[int, Field(ge=0, le=3600)] = 30
    """Seconds that open streams have to finish their current microbatch when the server ends."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log on stderr: text, or json with one object per line."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.datasets:
            raise ValueError("no dataset is configured; name at least one, e.g. --dataset NAME=PATH")
        for key in ("index_dirs", "quarantines"):
            unknown = sorted(set(getattr(self, key)) - set(self.datasets))
            if unknown:
                raise ValueError(f"{key} names {unknown}, which is not among the datasets {sorted(self.datasets)}")
        if "bytes" in self.tokenizers:
            raise ValueError("tokenizers names 'bytes', which is built in; give the file another name")
        _check_security(self)
        for peer in self.peers:
            if split_address(peer, "an entry of peers")[1] == 0:
                raise ValueError(f"an entry of peers is {peer!r}; the port that the peer listens on is required")
        return self


def _check_security(config: ServerConfig) -> None:
    """Refuse what does not belong together, and what would let strangers in."""
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("client_ca", "tls_cert")):
        if getattr(config, one) is not None and getattr(config, other) is None:
            raise ValueError(f"{one} is given without {other}; add it")
    if config.policy is not None and config.client_ca is None and config.token_file is None:
        raise ValueError("policy is given, and callers are not told apart; add client_ca, or token_file")
    if config.peers and config.tls_cert is not None and config.client_ca is None and config.tls_ca is None:
        raise ValueError("peers are given with tls_cert, and not who signs their certificates; add tls_ca")
    for peer in config.peers if config.token_file is not None and config.tls_cert is None else ():
        if not is_loopback(split_address(peer, "an entry of peers")[0]):
            raise ValueError(f"the peer {peer} would be shown a token unencrypted; add tls_cert and tls_key")
    if config.otlp_endpoint is not None:
        Collector.of(config.otlp_endpoint, insecure=config.insecure)
    if config.health_listen is not None:
        split_address(config.health_listen, "health_listen")
    for key in ("listen", "data_listen", "metrics_listen", "web_listen"):
        address = getattr(config, key)
        if address is not None:
            _check_address(config, key, address)


def _check_address(config: ServerConfig, key: str, address: str) -> None:
    if is_loopback(split_address(address, key)[0]):
        return
    if config.tls_cert is None and config.token_file is not None:
        raise ValueError(
            f"{key} is {address}, which others can reach, and tokens would travel unencrypted: add tls_cert and "
            "tls_key, or listen on 127.0.0.1"
        )
    if config.insecure:
        return
    if config.tls_cert is None:
        raise ValueError(
            f"{key} is {address}, which others can reach, and nothing is encrypted: add --tls-cert and --tls-key with "
            "--client-ca or --token-file; or listen on 127.0.0.1, or add --insecure where the network is trusted"
        )
    if config.client_ca is None and config.token_file is None:
        raise ValueError(
            f"{key} is {address}, which others can reach, and everybody would be let in: add --client-ca or "
            "--token-file, or --insecure where the network is trusted"
        )


def load_config(file: Path | None, overrides: Mapping[str, Any]) -> ServerConfig:
    """The configuration of a YAML file (paths relative to its folder), with flags put over it, maps entry by entry.

    Raises:
        ConfigError: naming the file's keys that are unknown or wrong.
    """
    merged = {} if file is None else _read(file)
    for key, value in overrides.items():
        found = merged.get(key)
        merged[key] = {**found, **value} if isinstance(value, Mapping) and isinstance(found, dict) else value
    try:
        return ServerConfig.model_validate(merged)
    except ValidationError as error:
        problems = dict.fromkeys(map(_problem, error.errors(include_url=False)))
        raise ConfigError("; ".join(problems)) from None


def _path(folder: Path, text: str) -> Path:
    """A path of the file, which may be relative to its folder, or a URL. Raises ConfigError where one has a secret."""
    try:
        found = location(Path(text))
    except DatasetError as error:
        raise ConfigError(str(error)) from None
    return found if is_url(found) else folder / text


def _problem(error: ErrorDetails) -> str:
    *path, last = error["loc"] or ("",)
    if last == "[key]":
        return f"configuration key {path[0]!r} holds the name {str(error['input'])[:128]!r}: {required(error)}"
    key = ".".join(str(part) for part in (*path, last))
    if error["type"] == "extra_forbidden":
        return f"configuration key {key!r} is unknown; the keys are {', '.join(ServerConfig.model_fields)}"
    text = "the path of a file or folder is required" if error["type"] == "path_type" else required(error)
    if not key:
        return text
    return f"configuration key {key!r} is {str(error['input'])[:128]}: {text}"


def _read(file: Path) -> dict[str, Any]:
    data = read_values("the configuration", file, ConfigError)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no mapping of configuration keys; the keys are {[*ServerConfig.model_fields]}")
    for key in ("datasets", "index_dirs", "quarantines", "tokenizers"):
        if isinstance(data.get(key), dict):
            data[key] = {n: _path(file.parent, v) if isinstance(v, str) else v for n, v in data[key].items()}
    for key in ("tls_cert", "tls_key", "client_ca", "tls_ca", "token_file", "policy"):
        if isinstance(data.get(key), str):
            data[key] = file.parent / data[key]
    return data
