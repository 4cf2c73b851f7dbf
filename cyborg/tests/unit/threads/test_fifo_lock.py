# SPDX-License-Identifier: Apache-2.0
import threading
import time

from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.threads.locks import FifoLock


def wait_for_waiters(lock: FifoLock, count: int) -> None:
    wait_until(f"{count} threads wait", lambda: len(lock._waiting) >= count)


def test_lock_is_given_in_the_order_of_waiting() -> None:
    lock, order = FifoLock(), list[int]()

    def work(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    with lock:
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_for_waiters(lock, count)
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_thread_that_acquires_again_waits_behind_the_others() -> None:
    lock, order = FifoLock(), list[str]()

    def work() -> None:
        with lock:
            order.append("other")

    other = threading.Thread(target=work)
    with lock:
        other.start()
        wait_for_waiters(lock, 1)
    with lock:
        order.append("again")
    other.join()
    assert order == ["other", "again"]


def test_acquire_gives_up_after_the_timeout() -> None:
    lock = FifoLock()
    assert lock.acquire()
    assert not lock.acquire(timeout=0.01)
    lock.release()
    assert lock.acquire(timeout=0)
    lock.release()


def test_lock_is_exclusive() -> None:
    lock, held, overlaps = FifoLock(), [0], [0]

    def work() -> None:
        for number in range(300):
            if lock.acquire(timeout=0.0005 if number % 3 else 5):
                held[0] += 1
                overlaps[0] += held[0] != 1
                time.sleep(0)
                held[0] -= 1
                lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [0]
    assert lock.acquire(timeout=0)
