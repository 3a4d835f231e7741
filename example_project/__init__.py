"""A project that uses django_faktory: `make demo` runs it."""
