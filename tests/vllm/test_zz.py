import time
import harness
from loadtest.model import DEFAULT_FOLDER
def test_t(tmp_path):
    with harness.lab(tmp_path, DEFAULT_FOLDER) as lab:
        s=lab.server('--capacity','1GiB')
        for sock in (s.socket, None):
            e=lab.engine(sock, '--kv-cache-memory-bytes','1000000000')
            a=harness.prompt(1,1500)
            for op in 'cccfcfcfcc':
                if op=='f': e.forget(); continue
                t=time.time(); c=e.complete(a,1); print('---',sock is None, round(time.time()-t,3), c.cached)
            e.stop()
