import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.List;

/**
 * The JDK's own HTTP client as everybody makes it: it offers HTTP/2 with every first request.
 *
 *     java StockClient.java URL MODEL
 *
 * Ends with 0 when everything was as it should be.
 */
class StockClient {
    public static void main(String[] arguments) throws Exception {
        URI chat = URI.create(arguments[0] + "/v1/chat/completions");
        String question = "{\"model\": \"" + arguments[1] + "\", \"temperature\": 0, \"max_tokens\": 16, "
            + "\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]";
        HttpClient client = HttpClient.newHttpClient();
        for (int turn = 0; turn < 3; turn++) {
            HttpResponse<String> answer = client.send(
                post(chat, question + "}"), HttpResponse.BodyHandlers.ofString());
            check(answer.statusCode() == 200, answer.statusCode() + " " + answer.body());
            check(answer.body().contains("Paris"), answer.body());
        }
        HttpResponse<java.util.stream.Stream<String>> stream = client.send(
            post(chat, question + ", \"stream\": true}"), HttpResponse.BodyHandlers.ofLines());
        List<String> lines = stream.body().filter(line -> !line.isEmpty()).toList();
        check(lines.size() > 5, lines.toString());
        check(lines.get(lines.size() - 1).equals("data: [DONE]"), lines.toString());
        HttpResponse<String> health = client.send(
            HttpRequest.newBuilder(URI.create(arguments[0] + "/health")).build(),
            HttpResponse.BodyHandlers.ofString());
        check(health.statusCode() == 200, health.body());
    }

    static HttpRequest post(URI where, String body) {
        return HttpRequest.newBuilder(where)
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    static void check(boolean isRight, String found) {
        if (!isRight) {
            System.err.println(found);
            System.exit(1);
        }
    }
}
