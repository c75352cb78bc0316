from bench.profiles import shares

REPORT = """\
# Samples: 1K of event 'cpu-clock:ppp'
# Overhead|Shared Object|Symbol
 20.25% |libpython3.11.so.1.0                             |[.] _PyEval_EvalFrameDefault|-      -
 30.00% |libpython3.11.so.1.0                             |[.] _PyObject_Malloc|-      -
 25.50% |[kernel.kallsyms]                                |[k] tcp_ack|-      -
 10.00% |charonia__mypyc.cpython-311-x86_64-linux-gnu.so  |[.] CPyDef_read|-      -
 9.25%  |_core.cpython-311-x86_64-linux-gnu.so            |[.] nghttp2_hd_table_get|-      -
 5.00%  |libunknown.so                                    |[.] something|-      -
"""


def test_samples_are_counted_by_library_and_the_loop_that_runs_source_within_the_interpreter() -> None:
    found = {group: share for group, share in shares(REPORT).items() if share}

    assert found == {
        "interpreter": 50.2,
        "evaluation": 20.2,
        "kernel": 25.5,
        "compiled": 10.0,
        "http2": 9.2,
        "other": 5.0,
    }
