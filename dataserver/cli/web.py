"""`dataserver web`: shows a fleet in a browser."""

import ssl
from pathlib import Path
from typing import Annotated, Final

import tyro

from dataserver.addresses import is_loopback, split_address
from dataserver.cli.arguments import MaybePath, ServerCredentials, Switch, Words, server_names
from dataserver.cli.end_signals import end_signals
from dataserver.cli.jobs import NO_DATA, Data, dataset_names, planner_of
from dataserver.images import silence_pillow_warnings
from dataserver.job_files import read_job
from dataserver.jobs import Catalog
from dataserver.reporting.fleet_calls import NamedServers
from dataserver.security import NO_CREDENTIALS, Channels, Watched, load_pair, load_tokens, server_context
from dataserver.web.background import Background
from dataserver.web.datasets import NO_DATASETS, DatasetPages, LocalData
from dataserver.web.fleet_page import FleetPage
from dataserver.web.fleet_watch import FleetWatch
from dataserver.web.jobs import FileJob, NoJobs
from dataserver.web.reports import StepReports
from dataserver.web.rights import ListedDatasets
from dataserver.web.samples import dataset_routes
from dataserver.web.server import Route, WebServer
from dataserver.web.steps import StepPages, step_routes
from dataserver.web.visitors import TokenDoor

MIN_INTERVAL_S: Final = 0.2
MAX_INTERVAL_S: Final = 60.0


def web(
    addresses: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ADDRESS...", help_behavior_hint="")
    ] = (),
    listen: str = "127.0.0.1:8420",
    interval_s: float = 2.0,
    data: Data = NO_DATA,
    job: MaybePath = None,
    web_cert: MaybePath = None,
    web_key: MaybePath = None,
    web_tokens: MaybePath = None,
    web_host: Words = (),
    insecure: Switch = False,
    credentials: ServerCredentials = NO_CREDENTIALS,
) -> None:
    """Show a fleet, datasets and the steps of a job in a browser, as `top`, `describe`, `lint` and `plan` show them.

    It prints the address of the page, which shows everything that these credentials may see on the servers. A dataset
    is shown if any server lists it for the credentials; without servers, all named datasets are shown. Nothing can be
    changed from the page. Ctrl-C or SIGTERM ends the command.

    Args:
        addresses: HOST:PORT of servers, or HOST:FIRST-LAST for a range of ports, separated by spaces or commas.
        listen: HOST:PORT of the page. Beyond loopback it needs --web-tokens, --web-cert and --web-key, or --insecure.
        interval_s: Seconds between two requests to the servers.
        data: Datasets to show, and tokenizers.
        job: YAML or JSON file of a job with these datasets, to show its steps.
        web_cert: PEM file of the certificate of the page, for https.
        web_key: PEM file of its private key.
        web_tokens: File of lines NAME TOKEN; every visitor must give one of the tokens as the password.
        web_host: Name by which browsers reach the page, if it is not an address of this machine; may be repeated.
        insecure: Let everybody who reaches the page see it, without encryption, because the network keeps strangers
            out.
        credentials: What to show the servers.
    """
    has_datasets = bool(data.dataset) or data.config is not None
    if job is not None and not has_datasets:
        raise ValueError(f"--job {job} is planned from indexes; add --dataset NAME=PATH for each of its datasets")
    names = _names(addresses, interval_s, has_datasets)
    host, port = split_address(listen, "--listen")
    door = None if web_tokens is None else TokenDoor(Watched([web_tokens], lambda: load_tokens(web_tokens)))
    tls = _tls(web_cert, web_key)
    _check_open(host, door is not None, tls is not None, insecure)
    servers = NamedServers(names, Channels(credentials))
    watch, work = FleetWatch(servers, interval_s), Background()
    local = NO_DATASETS
    if has_datasets:
        silence_pillow_warnings()
        settings = data.settings()
        local = LocalData(Catalog.open(settings), settings.datasets, settings.index_dirs)
    rights, reports = ListedDatasets(servers), StepReports(servers)
    datasets = DatasetPages(local, work, rights.fingerprints if names else None)
    routes: dict[str, Route] = {"/api/fleet": FleetPage(watch).document, **dataset_routes(datasets)}
    of_file = None if job is None else _job(job, local.catalog, datasets)
    routes |= step_routes(StepPages(of_file or NoJobs(), local.catalog.datasets, work, reports))
    server = WebServer(host, port, routes, door, None if tls is None else tls.get, web_host)
    try:
        watch.start()
        if of_file is not None:
            work.ask("job", lambda _: of_file.planner().num_steps, is_wanted_later=True)
        with end_signals() as (next_signal, _):
            print(f"the page is at {server.url}", flush=True)
            next_signal()
    finally:
        server.close()
        watch.close()
        work.close()
        reports.close()
        rights.close()


def _job(job: Path, catalog: Catalog, datasets: DatasetPages) -> FileJob:
    names = dataset_names(read_job(job))  # its text is refused now, and not when somebody looks
    return FileJob(lambda: planner_of(job, catalog), names, lambda name: datasets.named({"dataset": name}))


def _names(addresses: tuple[str, ...], interval_s: float, has_datasets: bool) -> tuple[str, ...]:
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ValueError(f"--interval-s is {interval_s}; {MIN_INTERVAL_S} to {MAX_INTERVAL_S} seconds are required")
    try:
        return server_names(addresses, may_be_none=has_datasets)
    except ValueError as error:
        raise error if addresses else ValueError(f"{error}, or a --dataset") from None


def _tls(certificate: Path | None, key: Path | None) -> Watched[ssl.SSLContext] | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ValueError("--web-cert and --web-key belong together, and one is missing; give both, or neither")
    pair = certificate, key

    def load() -> ssl.SSLContext:
        load_pair(*pair)
        return server_context(*pair, None)

    return Watched(pair, load)


def _check_open(host: str, has_tokens: bool, encrypts: bool, insecure: bool) -> None:
    """Refuse to show a fleet to strangers, and to have tokens sent in plain text."""
    if is_loopback(host):
        return
    if has_tokens and not encrypts:
        raise ValueError(f"--listen {host}: tokens would travel unencrypted; add --web-cert and --web-key")
    if not insecure and not (has_tokens and encrypts):
        raise ValueError(
            f"--listen {host} is reached from other machines: add --web-tokens, --web-cert and --web-key, or "
            "--insecure where the network itself keeps strangers out"
        )
