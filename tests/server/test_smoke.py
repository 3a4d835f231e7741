import json
from tests.server.raw import RawClient, push, worker


def test_round(connect):
    c = connect(**worker())
    assert c.ask(push(jid="abcdefgh")) == b"+OK"
    assert json.loads(c.ask("FETCH default"))["jid"] == "abcdefgh"
    assert c.ask('ACK {"jid":"abcdefgh"}') == b"+OK"
    assert c.ask('BEAT {"wid":"wid-1"}') == b"+OK"
    print(c.ask("INFO"))
    assert c.ask("NOPE") == b"-ERR unknown command NOPE"
    assert c.ask("FETCH default") is None
    assert c.ask("END") == b"+OK"
    assert c.is_closed()
