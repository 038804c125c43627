"""The pages that a server shows of its own fleet, datasets and jobs."""

import socket
from typing import Final

from dataserver.addresses import split_address
from dataserver.serving.server import DataServer
from dataserver.web.background import Background
from dataserver.web.datasets import DatasetPages, LocalData
from dataserver.web.fleet_page import FleetPage
from dataserver.web.fleet_watch import FleetWatch
from dataserver.web.jobs import ServedJobs
from dataserver.web.own_fleet import OwnFleet
from dataserver.web.reports import StepReports
from dataserver.web.samples import dataset_routes
from dataserver.web.server import Route, WebServer
from dataserver.web.steps import StepPages, step_routes
from dataserver.web.visitors import FLEET_PATH, ServerDoor

INTERVAL_S: Final = 2.0


class ServerPages:
    """Serves the pages until it is closed: behind the server's certificate, to whom it knows."""

    def __init__(self, server: DataServer, address: str) -> None:
        """Bind and serve.

        Args:
            server: serves already, with --web-listen.
            address: HOST:PORT of the pages.

        Raises:
            ConfigError: the address cannot be bound.
        """
        host, port = split_address(address, "--web-listen")
        door = None if server.access.is_open else ServerDoor(server.access, server.catalog.datasets)
        self._work = Background()
        own = OwnFleet(server)
        self._watch = FleetWatch(own, INTERVAL_S, rests=True)
        config, tls = server.config, server.tls
        local = LocalData(server.catalog, config.datasets, config.index_dirs)
        fleet = FleetPage(self._watch, None if door is None else door.may_read)
        datasets = DatasetPages(local, self._work, None if door is None else door.fingerprints, counts_withheld=False)
        jobs = ServedJobs(server.jobs.planners, None if door is None else door.may_read)
        self._reports = StepReports(own)
        steps = StepPages(jobs, server.catalog.datasets, self._work, self._reports)
        routes: dict[str, Route] = {FLEET_PATH: fleet.document, **dataset_routes(datasets), **step_routes(steps)}
        context = None if tls is None else lambda: tls.context
        names = (socket.gethostname(), *config.web_hosts)
        self._server = WebServer(host, port, routes, door, context, names, "--web-listen")
        self.url = self._server.url
        self._watch.start()

    def close(self) -> None:
        """Stop listening, and ask nobody any more."""
        self._server.close()
        self._watch.close()
        self._work.close()
        self._reports.close()
