"""A middleware with the Content-Security-Policy of strict projects: nothing inline, nothing from other hosts."""


def content_security_policy(get_response):
    def respond(request):
        response = get_response(request)
        response["Content-Security-Policy"] = "default-src 'self'"
        return response

    return respond
