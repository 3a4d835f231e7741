# Jobs of faktory_worker_ruby, as in its documentation: faktory-worker -r ./jobs.rb. Each class is a jobtype.

class Add
  include Faktory::Job

  def perform(x, y)
    raise "expected 4 and 5, got #{x} and #{y}" if x + y != 9
  end
end

class Fails
  include Faktory::Job

  def perform(text)
    raise ArgumentError, text
  end
end
