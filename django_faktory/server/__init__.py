"""FWP server: an asyncio front end for a Broker, without ORM, SQL or job lifecycle rules (ADR 0005)."""
