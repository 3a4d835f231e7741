"""A primary, a standby that confirms each commit, and the address at which clients find the primary.

The address is a proxy's. It leads to the old primary until it is switched, as names and virtual addresses do.
"""

from tests.faults.proxy import Proxy
from tests.faults.stores import Cluster
from tests.waiting import wait_until

SYNC = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"


class Standby(Cluster):
    """A standby, copied from a primary and following it."""

    def __init__(self, primary):
        self._primary = primary
        super().__init__()

    def _make(self):
        at = ("-h", "127.0.0.1", "-p", str(self._primary.port), "-U", "postgres")
        self._run("pg_basebackup", "-D", self.folder / "data", *at, "-R", "-X", "stream", "-c", "fast", "--no-sync")


class Pair:
    """A store with the same interface as the ones in `stores`."""

    def __init__(self):
        self.primary = Cluster()
        self._members = [self.primary]
        try:
            self.standby = Standby(self.primary)
            self._members.append(self.standby)
            self.database = self.primary.new_database().database
            self._wait_for_each_commit()
        except BaseException:
            self.clean_up()
            raise
        self.wire = Proxy(("127.0.0.1", self.primary.port))

    @property
    def environment(self):
        return self.primary.address("127.0.0.1", self.wire.port)

    def rows(self):
        return self.primary.rows()

    def take_no_writes(self):
        """Make the primary read-only; its connections stay open."""
        self._configure(self.primary, "default_transaction_read_only", "on")

    def stop_primary(self):
        """Stop the primary after it has sent all its changes to the standby."""
        self.primary.stop()

    def promote(self):
        """Make the standby the primary; the address still leads to the old one."""
        self.standby.execute("SELECT pg_promote()", database="postgres")
        wait_until(lambda: self.standby.execute("SELECT NOT pg_is_in_recovery()", database="postgres") == [(True,)])
        self.primary, self.standby = self.standby, self.primary
        self.primary.database = self.database
        self._configure(self.primary, "synchronous_standby_names", "''")

    def follow(self):
        """Start the stopped old primary as the standby of the new one."""
        self.standby.follow(self.primary.port)
        self._wait_for_each_commit()

    def switch_address(self):
        self.wire.lead_to(("127.0.0.1", self.primary.port))

    def clean_up(self):
        if hasattr(self, "wire"):
            self.wire.close()
        for member in self._members:
            member.clean_up()

    def _wait_for_each_commit(self):
        self._configure(self.primary, "synchronous_standby_names", "'*'")
        wait_until(lambda: self.primary.execute(SYNC, database="postgres"), what="the standby follows")

    @staticmethod
    def _configure(member, name, value):
        member.execute(f"ALTER SYSTEM SET {name} = {value}", database="postgres")
        member.execute("SELECT pg_reload_conf()", database="postgres")
