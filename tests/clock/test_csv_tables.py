"""Tables that users write, of delays, links, moments online and watts: anything amiss is one line that names its place.

Columns, cells, clients and numbers are read alike for all of them (``csv_tables.py``).
"""

import numpy as np
import pytest

from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import Limits, bind_conditions, bind_delays, energy
from fedjax_async.clock import network as networks
from tests.told import refusal

READERS = {
    "delays": lambda spec: bind_delays(spec, 3, 0),
    "trace": lambda spec: bind_delays(spec.replace("csv", "trace", 1), 3, 0),
    "links": lambda spec: networks.bind(spec, 3, 0),
    "edges": lambda spec: networks.bind(spec.replace("csv", "edges", 1), 3, 0),
    "online": lambda spec: bind_conditions(spec, None, Limits(), 3, 0),
    "watts": lambda spec: energy.bind(spec, 3, 0),
}


@pytest.mark.parametrize(("table", "text", "message"), [
    ("online", "", "must have a header line and at least one line"),
    ("online", "client,start,end\n", "must have a header line and at least one line"),
    ("online", b"\xff\xfe\x00\x80", "not a text file"),
    ("online", "client,start,end\n0,1," + "2" * 200_000, "not a table (field larger than field limit"),
    ("online", "client;start;end\n0;1;2\n", "not a table (separated by semicolons, but must be by commas, with a poi"),
    ("online", "client\tstart\tend\n0\t1,5\t2\n", "not a table (separated by tabs, but must be by commas"),
    ("delays", "client,mean\n0,1\n", "line 1, column 'std': missing"),
    ("delays", "client,mean,std,stdd\n0,1,1,1\n", "line 1, column 'stdd': unknown"),
    ("delays", "mean,std\n1,1\n", "one of the columns 'client' and 'device'"),
    ("delays", "client,mean,std\n0,1\n", "line 2: 2 cells for 3 columns"),
    ("delays", "client,mean,std\n0,1,1,7\n", "line 2: 4 cells"),
    ("delays", "client,mean,std\n0,1,\n", "line 2, column 'std': empty"),
    ("delays", "client,mean,std\n0,1,0\n1,nan,0\n", "line 3, column 'mean': 'nan' must be a finite number > 0"),
    ("delays", "client,mean,std\n0,0,0\n", "line 2, column 'mean'"),
    ("delays", "client,mean,std\n0,fast,1\n", "line 2, column 'mean'"),
    ("delays", "client,mean,std\n0,1,-1\n", "line 2, column 'std'"),
    ("delays", "client,mean,std\n0,1,inf\n", "line 2, column 'std'"),
    ("delays", "device,mean,std,compute\na,1,1,-2\n", "line 2, column 'compute'"),
    ("delays", "client,mean,std\n0,1,1\n0,1,1\n", "line 3, column 'client': 0 occurs twice"),
    ("delays", "client,mean,std\n0,1,1\n2,1,1\n", "no line for client 1 of 3"),
    ("links", "client,down,up\n0,1,1\n", "line 1, column 'latency': missing"),
    ("delays,reference_bytes=10", "device,mean,std\na,1,1\n", "no column 'compute'"),
    ("links", "client,down,up,latency\n0,0,1,1\n", "line 2, column 'down': '0' must be a finite number > 0"),
    ("links", "client,down,up,latency\n0,1,nan,1\n", "line 2, column 'up': 'nan'"),
    ("links", "client,down,up,latency\n0,1,1,-1\n", "line 2, column 'latency': '-1'"),
    ("links", "client,down,up,latency,jitter\n0,1,1,1,x\n", "line 2, column 'jitter': 'x'"),
    ("online", "client,start\n0,1\n", "line 1, column 'end': missing"),
    ("online", "client,start,start,end\n0,1,1,2\n", "line 1, column 'start': occurs twice"),
    ("online", "client,device,start,end\n0,a,1,2\n", "one of the columns 'client' and 'device'"),
    ("online", "client,start,end\n,1,2\n", "line 2, column 'client': empty"),
    ("online", "client,start,end\n0,1,2\n-1,1,2\n", "line 3, column 'client': '-1' must be a client number"),
    ("online", f"client,start,end\n{10**20},1,2\n", f"'{10**20}' must be a client number"),
    ("online", "client,start,end\n0,-1,2\n", "line 2, column 'start': '-1' must be a finite number >= 0"),
    ("online", "client,start,end\n0,1,inf\n", "line 2, column 'end': 'inf'"),
    ("online", "client,start,end\n0,2,2\n", "line 2, column 'end': 2 must be after the start, 2"),
    ("online", "client,start,end\n0,5,9\n0,1,6\n", "line 2, column 'start': 5.0 overlaps an interval until 6.0"),
    ("online", "client,start,end\n0,1,2\n2,1,2\n", "column 'client': no line for client 1 of 3"),
    ("online,repeat=9", "client,start,end\n0,0,2\n0,6,10\n", "line 3, column 'end': 10 must be at most repeat = 9"),
    ("edges", "source,target,rate,latency\n0,1,9,0\n1,0,1,1\n", "link from 0 to 1 occurs twice"),
    ("edges", "source,target,rate,latency\n0,2,0,1\n", "'0' must be a finite number > 0"),
    ("trace", "client,seconds\n0,1\n", "no line for client 1 of 3"),
    ("trace", "client,seconds\n0,1\n1,0\n", "must be a finite number > 0"),
    ("trace", "client,job,seconds\n0,0,1\n", "column 'job': unknown"),
    ("trace", "client\n0\n", "column 'seconds': missing"),
    ("watts", "device,idle\na,1\n", "column 'training': missing"),
    ("watts", "device,training\na,-3\n", "column 'training': '-3' must be a finite number >= 0"),
])  # fmt: skip
def test_anything_amiss_in_a_table_is_one_line_with_its_place(tmp_path, table, text, message):
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    name, *options = table.split(",")
    said = refusal(READERS[name], ",".join([f"csv:path={path}", *options]))
    assert message in said and "table.csv" in said


@pytest.mark.parametrize("table", ["delays", "trace"])
def test_lines_of_further_clients_are_said_to_be_unused(tmp_path, table):
    path, header = tmp_path / "table.csv", {"delays": "client,mean,std", "trace": "client,seconds"}[table]
    path.write_text("\n".join([header, *(",".join([str(k)] + ["1"] * header.count(",")) for k in range(5))]))
    with pytest.warns(RunWarning, match="table.csv: the lines of 2 further clients are not used .clients = 3."):
        READERS[table](f"csv:path={path}")


def test_a_client_is_the_same_device_in_all_tables_that_name_it(tmp_path):
    """In whatever order the tables list the devices, and if clients outnumber them."""
    devices = {f"phone {k}": k + 1 for k in range(6)}

    def table(name, header, row, order):
        (tmp_path / name).write_text("\n".join([header, *(row(device, devices[device]) for device in order)]))
        return f"csv:path={tmp_path / name}"

    names = sorted(devices)
    delays = table("delays", "device,mean,std", lambda name, k: f"{name},{k},0", names)
    trace = table("trace", "device,seconds", lambda name, k: f"{name},{k}", names[::-1]).replace("csv", "trace", 1)
    online = table("online", "device,start,end", lambda name, k: f"{name},{k},9", names[3:] + names[:3])
    watts = table("watts", "device,training", lambda name, k: f"{name},{k}", names[1:] + names[:1])
    drawn = set()
    for seed in range(3):
        who = np.arange(12)
        slowness = bind_delays(delays, 12, seed).durations(who, 0, 1, 0, 0)
        window = bind_conditions(online, None, Limits(), 12, seed).availability[0].interval
        assert sorted(slowness[:6]) == sorted(slowness[6:]) == [1, 2, 3, 4, 5, 6]  # none twice while others last
        drawn.add(tuple(slowness))
        np.testing.assert_array_equal(bind_delays(trace, 12, seed).durations(who, 0, 1, 0, 0), slowness)
        np.testing.assert_array_equal([window(k, 0.0)[0] for k in who], slowness)
        np.testing.assert_array_equal(energy.bind(watts, 12, seed).training, slowness)
    assert len(drawn) == 3
