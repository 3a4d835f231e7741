"""Operations that admin, REST API and command line share."""
