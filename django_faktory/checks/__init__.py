"""System checks of Django's framework (`manage.py check`). Importing a module registers its checks."""
