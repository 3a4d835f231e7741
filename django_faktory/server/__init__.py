"""The FWP server: an asyncio front over a Broker. Knows no ORM, SQL or rule of a job's life (ADR 0005)."""
