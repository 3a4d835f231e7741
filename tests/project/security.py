"""What careful projects send with each page: nothing inline, nothing from elsewhere."""


def content_security_policy(get_response):
    def respond(request):
        response = get_response(request)
        response["Content-Security-Policy"] = "default-src 'self'"
        return response

    return respond
