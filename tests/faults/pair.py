"""A primary, a standby that every commit waits for, and the address at which clients look for the primary.

The address is a proxy's: it leads to the old primary until it is told of the new one, as names and virtual
addresses do.
"""

from tests.faults.proxy import Proxy
from tests.faults.stores import Cluster
from tests.waiting import wait_until

SYNC = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"


class Standby(Cluster):
    """Made of a primary, and following it."""

    def __init__(self, primary):
        self._primary = primary
        super().__init__()

    def _make(self):
        at = ("-h", "127.0.0.1", "-p", str(self._primary.port), "-U", "postgres")
        self._run("pg_basebackup", "-D", self.folder / "data", *at, "-R", "-X", "stream", "-c", "fast", "--no-sync")


class Pair:
    """A store, as those of `stores`."""

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
        """The primary, while its connections stand."""
        self._configure(self.primary, "default_transaction_read_only", "on")

    def stop_primary(self):
        """And ship all it has."""
        self.primary.stop()

    def promote(self):
        """The standby is the primary; the address does not know yet."""
        self.standby.execute("SELECT pg_promote()", database="postgres")
        wait_until(lambda: self.standby.execute("SELECT NOT pg_is_in_recovery()", database="postgres") == [(True,)])
        self.primary, self.standby = self.standby, self.primary
        self.primary.database = self.database
        self._configure(self.primary, "synchronous_standby_names", "''")

    def follow(self):
        """The old primary, which has been stopped, comes back as the standby of the new one."""
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
        wait_until(lambda: self.primary.execute(SYNC, database="postgres"), 30, what="the standby follows")

    @staticmethod
    def _configure(member, name, value):
        member.execute(f"ALTER SYSTEM SET {name} = {value}", database="postgres")
        member.execute("SELECT pg_reload_conf()", database="postgres")
