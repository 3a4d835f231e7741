"""A project with django-tenants: two tenants in schemas of one PostgreSQL database, in processes of its own."""
