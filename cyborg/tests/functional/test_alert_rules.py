# SPDX-License-Identifier: Apache-2.0
"""promtool runs each alert on series that it must and must not report."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from oslo_config import cfg

from cyborg import conf as options
from cyborg.conductor.metrics import METRICS
from cyborg.telemetry.recorder import FAMILIES
from cyborg.tests.fixtures.monitoring.prometheus import (
    DASHBOARD,
    ROOT,
    RULES,
    list_alerts,
    list_expressions,
    run_promtool,
)

PAGE = ROOT / "doc" / "source" / "admin" / "monitoring.rst"
PROCESSES = {
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
}
# Minutes of the simulated time in which the cause of an alert lasts, and its end.
START, END, LENGTH = 60, 180, 320
# Alerts of one run of promtool, which evaluates all rules of a file in each test.
BATCH = 4


@dataclass(frozen=True)
class Case:
    """Series of an alert, as expanding notation for the time before, during and after its cause."""

    series: str
    normal: str
    failing: str
    labels: str = ""
    others: tuple[tuple[str, str], ...] = ()  # series of the normal operation
    is_clock: bool = False  # the values are Unix times


CASES = {
    "CyborgNoConductor": Case("cyborg_database_up", "1", "_"),
    "CyborgDatabaseDown": Case('cyborg_database_up{instance="c1"}', "1", "0", 'instance="c1"'),
    "CyborgAgentDown": Case('cyborg_services{binary="cyborg-agent",state="down"}', "0", "1"),
    "CyborgServiceDown": Case(
        'cyborg_services{binary="cyborg-api",state="down"}', "0", "1", 'binary="cyborg-api"'
    ),
    "CyborgHostsCordoned": Case("cyborg_hosts_cordoned", "0", "1"),
    "CyborgLoopBlocked": Case(
        'process_loop_overdue_seconds{instance="c1",loop="jobs"}',
        "0",
        "99",
        'instance="c1", loop="jobs"',
    ),
    "CyborgDeviceUnhealthy": Case(
        'cyborg_device_unhealthy_seconds{host="h",address="a"}', "_", "9", 'address="a", host="h"'
    ),
    "CyborgDeviceFailing": Case("cyborg_devices_failing", "0", "1"),
    "CyborgClassExhausted": Case(
        'cyborg_class_handles{resource_class="FPGA",state="free"}',
        "1",
        "0",
        'resource_class="FPGA"',
    ),
    "CyborgDeviceSetsExhausted": Case(
        'cyborg_device_sets{kind="fabric",size="4",offer="offered"}',
        "1",
        "0",
        'kind="fabric", size="4"',
        others=(('cyborg_device_sets{kind="fabric",size="4",offer="allocated"}', "2"),),
    ),
    "CyborgBindFailures": Case(
        'cyborg_binds_total{outcome="no_handle"}',
        "+0",
        "+10",
        others=(('cyborg_binds_total{outcome="bound"}', "+50"),),
    ),
    "CyborgBindStuck": Case("cyborg_bind_oldest_seconds", "600", "601"),
    "CyborgGuestWithoutDevice": Case("cyborg_guest_devices_missing", "0", "1"),
    "CyborgOrphans": Case("cyborg_arqs_orphan_suspected", "0", "1"),
    "CyborgOrphanScanStopped": Case(
        'cyborg_self_heal_last_timestamp_seconds{kind="orphan_scans"}', "+60", "+0", is_clock=True
    ),
    "CyborgApiErrors": Case(
        'cyborg_api_requests_total{method="GET",route="/",status="503"}',
        "+0",
        "+10",
        others=(('cyborg_api_requests_total{method="GET",route="/",status="200"}', "+100"),),
    ),
    "CyborgApiSlow": Case(
        'cyborg_api_request_seconds_bucket{method="GET",route="/",le="5"}',
        "+100",
        "+90",
        others=tuple(
            (f'cyborg_api_request_seconds_bucket{{method="GET",route="/",le="{limit}"}}', "+100")
            for limit in ("10", "+Inf")
        ),
    ),
    "CyborgRpcErrors": Case(
        'cyborg_rpc_client_calls_total{method="agent.job",result="timed_out"}',
        "+0",
        "+10",
        others=(('cyborg_rpc_client_calls_total{method="agent.job",result="ok"}', "+100"),),
    ),
    "CyborgDeadLetters": Case(
        'cyborg_outbox_messages{kind="nova-event",state="dead"}', "0", "1", 'kind="nova-event"'
    ),
    "CyborgDeliveriesDelayed": Case(
        'cyborg_outbox_oldest_seconds{kind="nova-event"}', "300", "301", 'kind="nova-event"'
    ),
    "CyborgHostWorkOverdue": Case(
        'cyborg_jobs_overdue{kind="release"}', "0", "1", 'kind="release"'
    ),
    "CyborgAuditFindings": Case("cyborg_audit_findings", "0", "1"),
    "CyborgNotificationsDropped": Case(
        'process_nova_notifications_total{instance="c1",result="dropped"}',
        "+0",
        "+1",
        'instance="c1"',
    ),
    "CyborgPlacementBehind": Case("cyborg_placement_sync_lag_seconds", "900", "901"),
    "CyborgProvidersFailing": Case("cyborg_providers_failing", "0", "1"),
    "CyborgVerificationLate": Case("cyborg_placement_verification_age_seconds", "3600", "3601"),
}


def expand(start: int, form: str, count: int) -> tuple[str, int]:
    """Return values of ``count`` minutes in promtool's notation, and the last value."""
    if form.startswith("+"):
        step = int(form)
        return f"{start + step}+{step}x{count - 1}", start + step * count
    return f"_x{count}" if form == "_" else f"{form}+0x{count - 1}", start


def describe(case: Case) -> list[dict[str, str]]:
    """Return the input series of a case."""
    last, parts = 0, []
    forms = (case.normal, case.failing, case.normal)
    for form, begin, end in zip(forms, (0, START, END), (START, END, LENGTH), strict=True):
        if case.is_clock and form == case.normal:
            last = begin * 60
        part, last = expand(last, form, end - begin)
        parts.append(part)
    series = [(case.series, " ".join(parts))]
    series += [(name, expand(0, form, LENGTH)[0]) for name, form in case.others]
    return [{"series": name, "values": values} for name, values in series]


def make_test(alert: str, case: Case) -> dict[str, Any]:
    """Return a test of promtool: the alert fires during the cause only."""
    rule = list_alerts()[alert]
    name = f'alertname="{alert}", alertstate="firing"'
    labels = ", ".join(
        filter(None, (name, case.labels, f'severity="{rule["labels"]["severity"]}"'))
    )
    query = f"ALERTS{{{name}}}"
    fires = [{"labels": f"ALERTS{{{labels}}}", "value": 1}]
    moments: tuple[tuple[int, list[Any]], ...] = (
        (START - 1, []),
        (END - 1, fires),
        (LENGTH - 1, []),
    )
    return {
        "name": alert,
        "interval": "1m",
        "input_series": describe(case),
        "promql_expr_test": [
            {"expr": query, "eval_time": f"{minute}m", "exp_samples": samples}
            for minute, samples in moments
        ],
    }


@pytest.mark.requires("prometheus")
def test_alerts_fire_and_end_with_their_cause(tmp_path: Path) -> None:
    assert set(CASES) == set(list_alerts())
    names = list(CASES)
    for first in range(0, len(names), BATCH):
        alerts = names[first : first + BATCH]
        rules = [list_alerts()[alert] for alert in alerts]
        group = {"name": "batch", "rules": rules}
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [group]}), encoding="utf-8")
        document = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": "5m",
            "tests": [make_test(alert, CASES[alert]) for alert in alerts],
        }
        file = tmp_path / "tests.yaml"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        result = run_promtool("test", "rules", file)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.requires("prometheus")
def test_rules_are_valid_and_a_wrong_expectation_fails(tmp_path: Path) -> None:
    assert run_promtool("check", "rules", RULES).returncode == 0
    test = make_test("CyborgBindStuck", Case("cyborg_bind_oldest_seconds", "1", "2"))
    document = {"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": [test]}
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert "CyborgBindStuck" in run_promtool("test", "rules", file).stderr


@pytest.mark.requires("prometheus")
def test_configuration_of_the_page_is_valid(tmp_path: Path) -> None:
    blocks = re.findall(
        r"code-block:: (\w+)\n\n((?: {6}.*\n|\n)+)", PAGE.read_text(encoding="utf-8")
    )
    found = {language: textwrap.dedent(text) for language, text in blocks}
    file = tmp_path / "prometheus.yaml"
    file.write_text(found["yaml"].replace("/etc/prometheus/cyborg.rules.yaml", str(RULES)))
    result = run_promtool("check", "config", file)
    assert result.returncode == 0, result.stderr
    assert f"{len(CASES)} rules found" in result.stdout
    config = tmp_path / "cyborg.conf"
    config.write_text(found["ini"], encoding="utf-8")
    conf = cfg.ConfigOpts()
    options.register(conf)
    conf(["--config-file", str(config)], project="cyborg")
    scraped = yaml.safe_load(found["yaml"])["scrape_configs"][0]["static_configs"][0]["targets"]
    for section in (conf.conductor, conf.api):
        assert f"{section.metrics_listen}:{section.metrics_port}" in scraped


@pytest.mark.static
def test_expressions_use_existing_metrics_and_labels() -> None:
    labels = {name: set(found) for name, (_, found) in METRICS.items()}
    for family in FAMILIES.values():
        suffixes = ("_bucket", "_count", "_sum") if family.buckets else ("",)
        labels |= {f"{family.name}{suffix}": set(family.labels) for suffix in suffixes}
    labels |= {name: {"pid"} for name in PROCESSES}
    texts = [text for _, text in list_expressions()]
    texts += [rule["expr"] for rule in list_alerts().values()]
    used = set()
    for text in texts:
        for name, selector in re.findall(r"\b((?:cyborg|process)_\w+)(\{[^}]*\})?", text):
            if name in labels:
                found = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector))
                assert found <= labels[name], text
                used.add(name)
            else:
                assert f'"{name}' in text, name
    # Each metric of the service is on the dashboard or in an alert, or is a sum of such a one.
    missing = set(METRICS) - used
    missing |= {name for name in FAMILIES if not any(item.startswith(name) for item in used)}
    assert missing == {"cyborg_handles"}


@pytest.mark.static
def test_alerts_have_descriptions_and_sections_of_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, rule in list_alerts().items():
        assert set(rule["annotations"]) == {"summary", "description", "docs"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["docs"] == f"admin/monitoring.html#{name.lower()}"
        _, _, section = page.partition(f"\n{name}\n{'-' * len(name)}\n")
        text = " ".join(section.replace("``", "").split())
        assert rule["annotations"]["description"] in text, name
    documented = set(re.findall(r"^(Cyborg[A-Z]\w+)\n-+$", page, re.MULTILINE))
    assert documented == set(CASES)


@pytest.mark.static
def test_dashboard_has_one_data_source_and_no_overlapping_panels() -> None:
    dashboard = yaml.safe_load(DASHBOARD.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        rows = range(place["y"], place["y"] + place["h"])
        found = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in rows}
        assert not cells & found, panel["title"]
        assert max(x for x, _ in found) < 24
        cells |= found
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in panels}) == len(panels)
