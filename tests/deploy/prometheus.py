"""A real Prometheus with the settings and rules of `deploy/prometheus`, in a hurry."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import urllib.parse
import urllib.request

import yaml
from kvtier.endpoints import free_port
from support import until

from deploy.generate.catalog import ROOT

SETTINGS = ROOT / "deploy/prometheus/prometheus.yaml"
LOOPBACK = "127.0.0.1"
INTERVAL = "1s"
"""Between scrapes, and between evaluations."""
START_SECONDS = 30.0


class Prometheus:
    """What a running one knows."""

    def __init__(self, url):
        self.url = url

    def ask(self, path, **query):
        """Return the data of one answer of its API."""
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=20) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def values(self, expression):
        """Return the values of an expression now, by their labels; NaN is left out."""
        found = self.ask("/api/v1/query", query=expression)["result"]
        samples = [(each["metric"], float(each["value"][1])) for each in found]
        return [(labels, value) for labels, value in samples if not math.isnan(value)]

    def has(self, expression):
        """Whether there is any sample, NaN included."""
        return bool(self.ask("/api/v1/query", query=expression)["result"])

    def rules(self):
        """Return every rule as Prometheus judges it."""
        groups = self.ask("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def alert(self, name):
        """Return the labels and states of an alert's cases, firing or about to."""
        [rule] = [rule for rule in self.rules() if rule["name"] == name]
        return rule["alerts"]

    def scraped(self, jobs):
        """Whether each job's target answered last time."""
        up = {labels["job"]: value for labels, value in self.values("up")}
        return up == dict.fromkeys(jobs, 1.0)


def settings(targets):
    """Return the settings of `deploy/prometheus`, with `targets` by job, faster."""
    written = yaml.safe_load(SETTINGS.read_text("utf-8"))
    written["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    written["rule_files"] = [str(SETTINGS.parent / name) for name in written["rule_files"]]
    jobs = [job for job in written["scrape_configs"] if job["job_name"] in targets]
    assert len(jobs) == len(targets)
    for job in jobs:
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    return written | {"scrape_configs": jobs}


@contextlib.contextmanager
def running(folder, targets):
    """Give a Prometheus that has scraped each target, given by job as host:port, and end it."""
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(settings(targets)))
    address = f"{LOOPBACK}:{free_port(LOOPBACK)}"
    command = ["prometheus", f"--config.file={config}", f"--web.listen-address={address}"]
    command += [f"--storage.tsdb.path={folder / 'prometheus'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(f"http://{address}")

        def scraped():
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            with contextlib.suppress(OSError):
                return prometheus.scraped(targets)
            return False

        until(scraped, "Prometheus's first scrapes", START_SECONDS)
        yield prometheus
    finally:
        process.terminate()
        process.wait(20)
