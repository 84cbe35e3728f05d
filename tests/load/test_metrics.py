import math
import socket
import threading
import time

import pytest

from clients import InvalidInput
from clients.load.metrics import (
    MetricsSampler,
    Reading,
    batch_sizes,
    gpu_utilisation,
    parse_metrics,
    pending,
    rates,
)
from tests.tools.played import playing
from tests.tools.waiting import until

PAGE = """# HELP nv_inference_count Number of inferences performed
# TYPE nv_inference_count counter
nv_inference_count{model="encode",version="1"} 40
nv_inference_count{model="encoder_128",version="1"} 30
nv_inference_count{model="encoder_128",version="2"} 2
nv_inference_exec_count{model="encoder_128",version="1"} 8
nv_inference_pending_request_count{model="encode",version="1"} 5
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.75
nv_energy_consumption{gpu_uuid="GPU-1"} 12.5
"""


def test_a_page_is_read_by_model_with_versions_added_up() -> None:
    assert parse_metrics(PAGE) == {
        "nv_inference_count": {"encode": 40.0, "encoder_128": 32.0},
        "nv_inference_exec_count": {"encoder_128": 8.0},
        "nv_inference_pending_request_count": {"encode": 5.0},
        "nv_gpu_utilization": {"GPU-1": 0.75},
    }


def test_a_figure_that_is_no_number_is_not_known() -> None:
    page = PAGE.replace('"GPU-1"} 0.75', '"GPU-1"} Nan') + 'nv_gpu_utilization{gpu_uuid="GPU-2"} 0.5\n'
    reading = Reading(3.0, parse_metrics(page))
    assert reading.values["nv_gpu_utilization"] == {"GPU-2": 0.5}
    assert gpu_utilisation([reading]) == 0.5
    none = Reading(3.0, parse_metrics(page.replace("0.5", "+Inf")))
    assert gpu_utilisation([none]) is None


def test_figures_over_time_come_from_the_changes_between_readings() -> None:
    readings = [
        Reading(0.0, {"nv_inference_count": {"m": 0.0}, "nv_inference_exec_count": {"m": 0.0}}),
        Reading(2.0, {"nv_inference_count": {"m": 40.0}, "nv_inference_exec_count": {"m": 5.0}}),
        Reading(3.0, {"nv_inference_count": {"m": 40.0}, "nv_inference_exec_count": {"m": 5.0}}),
    ]
    assert rates(readings).values == {"m": [20.0, 0.0]}
    sizes = batch_sizes(readings)
    assert sizes.at == [2.0, 3.0]
    assert sizes.values["m"][0] == 8.0
    assert math.isnan(sizes.values["m"][1])


def test_counters_that_begin_anew_give_no_figure() -> None:
    readings = [
        Reading(0.0, {"nv_inference_count": {"m": 90.0}, "nv_inference_exec_count": {"m": 9.0}}),
        Reading(1.0, {"nv_inference_count": {"m": 4.0}, "nv_inference_exec_count": {"m": 2.0}}),
    ]
    assert math.isnan(rates(readings).values["m"][0])
    assert math.isnan(batch_sizes(readings).values["m"][0])


def test_the_queue_and_the_gpu_are_read_as_they_stand() -> None:
    readings = [Reading(0.5, parse_metrics(PAGE)), Reading(1.0, {})]
    assert pending(readings).values == {"encode": [5.0, 0.0]}
    assert gpu_utilisation(readings) == 0.75
    assert gpu_utilisation([Reading(0.0, {})]) is None


def test_a_page_is_sampled_while_the_block_runs_and_a_failing_one_ends_nothing() -> None:
    answers = iter([200, 500])

    with (
        playing(lambda asked: (next(answers, 200), PAGE)) as port,
        MetricsSampler(f"http://127.0.0.1:{port}/metrics", interval=0.02) as sampler,
    ):
        assert until(lambda: len(sampler.readings) >= 3)
    count = len(sampler.readings)
    assert sampler.readings[0].values["nv_inference_count"] == pytest.approx({"encode": 40.0, "encoder_128": 32.0})
    time.sleep(0.1)
    assert len(sampler.readings) == count, "it stops with the block"
    later = sampler.since(sampler.began + sampler.readings[1].at)
    assert [one.at for one in later] == pytest.approx(
        [one.at - sampler.readings[1].at for one in sampler.readings[1:]]
    ), "from the moment of the load's start, by its clock"


def test_what_speaks_no_http_is_no_reading_and_ends_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answered = threading.Event()

        def answer() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"\0\0\x12\x04\0 no HTTP\r\n")
            answered.set()

        threading.Thread(target=answer, daemon=True).start()
        with MetricsSampler(f"http://127.0.0.1:{server.getsockname()[1]}/metrics", interval=0.01) as sampler:
            assert answered.wait(10), "it goes on after the first"
    assert sampler.readings == []
    with pytest.raises(InvalidInput, match="address of the metrics"):
        MetricsSampler("127.0.0.1:8002/metrics")
