import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Base64;

import org.apache.kafka.common.utils.Exit;

/**
 * Runs one console tool of Apache Kafka after the other, each as its own `main`, in one JVM: what its start costs is
 * paid once. Asked on standard input, a line for each run: the main class and the words after it, in base64, with
 * spaces between them. Answers with a line: the exit status, and what was said on standard output and standard error,
 * in base64, each after a space. Nothing, as a word or said, is "-". Called by java_tools.py.
 */
public class ToolsHost {
    /** Takes the place of the end of the JVM. */
    static final class Ended extends RuntimeException {
        Ended() {
            super("the tool has ended", null, false, false);
        }
    }

    /** What tools and their libraries keep as standard output, whosever turn it is. */
    static final class Said extends OutputStream {
        private final ByteArrayOutputStream bytes = new ByteArrayOutputStream();

        @Override
        public synchronized void write(int each) {
            bytes.write(each);
        }

        @Override
        public synchronized void write(byte[] some, int from, int count) {
            bytes.write(some, from, count);
        }

        synchronized String taken() {
            String taken = Base64.getEncoder().encodeToString(bytes.toByteArray());
            bytes.reset();
            return taken.isEmpty() ? "-" : taken;
        }
    }

    private static Integer status;

    private static void end(int given, String message) {
        if (status == null) {
            status = given; // what a tool's own handlers make of Ended comes too late
        }
        throw new Ended();
    }

    public static void main(String[] words) throws Exception {
        PrintStream answers = System.out;
        Said out = new Said(), err = new Said();
        System.setOut(new PrintStream(out, true));
        System.setErr(new PrintStream(err, true));
        Exit.setExitProcedure(ToolsHost::end);
        Exit.setHaltProcedure(ToolsHost::end);
        BufferedReader asked = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = asked.readLine(); line != null; line = asked.readLine()) {
            String[] run = Arrays.stream(line.split(" "))
                .map(word -> word.equals("-") ? "" : new String(Base64.getDecoder().decode(word), StandardCharsets.UTF_8))
                .toArray(String[]::new);
            status = null;
            try {
                Class.forName(run[0]).getMethod("main", String[].class)
                    .invoke(null, (Object) Arrays.copyOfRange(run, 1, run.length));
            } catch (InvocationTargetException failed) {
                if (status == null) { // as an exception that nobody catches ends a JVM
                    failed.getCause().printStackTrace();
                    status = 1;
                }
            }
            System.out.flush();
            System.err.flush();
            answers.println((status == null ? 0 : status) + " " + out.taken() + " " + err.taken());
            answers.flush();
        }
    }
}
